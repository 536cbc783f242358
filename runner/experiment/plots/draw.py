"""What a model said of a split goes in, on the host; the pictures that suit its task come out, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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

    kind: str  # of the task: multiclass | multilabel | regression | autoencoding
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


Draw = Callable[[Results, Path], bool]


def draw_results(
    results: Results, folder: Path, *, wanted: Sequence[str], say: Callable[[str], None] = print
) -> list[Path]:
    """The wanted pictures that make sense of these results; returns their files, about 0.15 s each.

    wanted: names as in runner.tasks.metric_names.PLOTS. say: told, in a line, of a picture that failed. Raises nothing.
    """
    drawn = []
    for name in wanted:
        path = folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _drawing(name)(results, path):
                drawn.append(path)
        except Exception as error:
            say(f"plots: {path.name} left out: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return drawn


def _drawing(name: str) -> Draw:
    """The function that draws it; each returns whether there was anything to draw."""
    from runner.experiment.plots import (  # they import from here
        boundary,
        calibration,
        confusion,
        residuals,
        roc,
        samples,
    )

    return {
        "confusion": confusion.draw,
        "roc": roc.draw,
        "calibration": calibration.draw,
        "residuals": residuals.draw,
        "samples": samples.draw,
        "reconstructions": samples.draw_reconstructions,
        "boundary": boundary.draw,
    }[name]
