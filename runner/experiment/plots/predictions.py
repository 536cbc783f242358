"""Defines what a model said of a split, on the host: collect.py makes it, every picture is drawn from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Shown:
    """Some rows, with their inputs: the worst ones first."""

    inputs: Floats  # (K, ...)
    predictions: Floats  # (K, C) or (K, T)
    targets: NDArray[np.generic]  # (K,), (K, C) or (K, T)


@dataclass(frozen=True)
class Plane:
    """What the model says all over the plane of its two inputs, and some rows on it."""

    x: Floats  # (G,)
    y: Floats  # (G,)
    predictions: Floats  # (G, G, C) or (G, G, T), by y and x
    train: tuple[Floats, NDArray[np.generic]] | None  # (N, 2) and the targets
    rows: tuple[Floats, NDArray[np.generic]]  # of the split
    names: tuple[str, str] = ("first input", "second input")


@dataclass(frozen=True)
class Results:
    """What a model said of the rows of a split, and what is so."""

    kind: str  # of the task: multiclass | multilabel | regression | autoencoding | generation
    predictions: Floats  # (N, C) probabilities, or (N, T) values
    targets: NDArray[np.generic]  # (N,) classes, (N, C) of 0 and 1, or (N, T) values
    classes: tuple[str, ...] = ()  # names, by index
    names: tuple[str, ...] = ()  # of the labels or of a regression's numbers
    split: str = "test"
    of: str = ""  # model, data and device, for the titles
    num_rows: int | None = None  # of the whole split, where these are not all
    worst: Shown | None = None
    first: Shown | None = None
    plane: Plane | None = None

    @property
    def title(self) -> str:
        """Model, data, device, split and how many rows."""
        count = f"{len(self.predictions):,}"
        if self.num_rows is not None and self.num_rows > len(self.predictions):
            count += f" of {self.num_rows:,}"
        return ", ".join(filter(None, (self.of, f"{self.split} split, {count} rows")))
