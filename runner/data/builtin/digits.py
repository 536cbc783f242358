"""Loads scikit-learn's 1,797 handwritten digits, real scans that are shipped with the library: `data=digits`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.source import Source, from_arrays
from runner.data.vision.augment import augmented


def digits(augment: Mapping[str, Any] | Sequence[Any] | None = None) -> Source:
    """Images (1797, 1, 8, 8) in 0..1 and their classes 0..9 (UCI optical recognition of handwritten digits).

    augment: see runner.data.vision.augment.
    """
    # (1797, 65): 64 pixels in 0..16, then the class
    rows = np.loadtxt(shipped("digits.csv.gz"), delimiter=",", dtype=np.uint8)
    images = rows[:, :-1].reshape(-1, 1, 8, 8) / 16
    source = from_arrays(images, rows[:, -1].astype(np.int64), name="digits", origin="scikit-learn load_digits")
    return augmented(source, augment)


def shipped(name: str) -> Path:
    """A file of scikit-learn's own data. They are read as they lie: importing it takes a second in every job of a sweep."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None  # a dependency of ours
    return Path(found.origin).parent / "datasets" / "data" / name
