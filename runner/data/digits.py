"""Nothing goes in; scikit-learn's 1,797 handwritten digits come out: real scans, shipped with the library."""

from __future__ import annotations

from runner.data.source import Source, from_arrays


def digits() -> Source:
    """Images (1797, 1, 8, 8) in 0..1 and their classes 0..9 (UCI optical recognition of handwritten digits)."""
    from sklearn.datasets import load_digits  # half a second to import

    found = load_digits()
    return from_arrays(found.images[:, None] / 16, found.target, name="digits", origin="scikit-learn load_digits")
