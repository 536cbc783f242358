"""Loads scikit-learn's 1,797 handwritten digits, real scans that are shipped with the library: `data=digits`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.source import Source, from_arrays
from runner.data.vision.augment import augmented

IN_THE_PACKAGE = "datasets/data/digits.csv.gz"


def digits(augment: Mapping[str, Any] | Sequence[Any] | None = None) -> Source:
    """Images (1797, 1, 8, 8) in 0..1 and their classes 0..9 (UCI optical recognition of handwritten digits).

    augment: see runner.data.vision.augment.
    """
    rows = np.loadtxt(_file(), delimiter=",", dtype=np.uint8)  # (1797, 65): 64 pixels in 0..16, then the class
    images = rows[:, :-1].reshape(-1, 1, 8, 8) / 16
    source = from_arrays(images, rows[:, -1].astype(np.int64), name="digits", origin="scikit-learn load_digits")
    return augmented(source, augment)


def _file() -> Path:
    """The file that load_digits() reads: importing scikit-learn for it takes a second in every job of a sweep."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None  # a dependency of ours
    return Path(found.origin).parent / IN_THE_PACKAGE
