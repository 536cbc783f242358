"""Draws a run's curves, a plot for each kind of value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.tasks.metric_names import PLOTS
from runner.tracking.journal_reader import Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLIT_COLORS = {"train": "#4878d0", "val": "#ee854a", "test": "#2f2f2f"}
NUM_SMOOTHED = 100  # points of a smoothed curve
TAKEN = {name for names in PLOTS.values() for name in names}  # names of other plots


def draw_curves(
    points: Mapping[str, Series], folder: Path, *, title: str, best: tuple[str, int] | None = None
) -> list[Path]:
    """Draw one plot for each kind of value (loss, accuracy, ...), its splits together; return the files. 0.3 s each.

    best: The metric and the step of the kept weights, marked in its plot.
    """
    kinds: dict[str, dict[str, Series]] = {}
    for name, series in points.items():
        split, _, kind = name.partition("/")
        if split in SPLIT_COLORS and len(series[0]) > 0:
            kinds.setdefault(kind, {})[split] = series
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for kind, splits in kinds.items():
        if any(len(series[0]) > 1 for series in splits.values()):
            step = best[1] if best and best[0].partition("/")[2] == kind else None
            path = folder / f"{kind.replace('/', '_')}{'_curve' * (kind in TAKEN)}.png"
            drawn.append(style.save(_draw(kind, splits, title=title, best_step=step), path))
    return drawn


def thin(
    steps: NDArray[np.int64], values: NDArray[np.float64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `count` points: the means of the finite values of equal bins, NaN for a bin without any."""
    count = min(count, len(steps))
    begins = np.arange(count) * len(steps) // max(1, count)
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite.astype(np.int64), begins)
    sums = np.add.reduceat(np.where(finite, values, 0.0), begins)
    sizes = np.diff(begins, append=len(steps))
    return np.add.reduceat(steps, begins) // sizes, np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _draw(kind: str, splits: Mapping[str, Series], *, title: str, best_step: int | None) -> Figure:
    figure, (axes,) = style.panels(title, kind, (7, 4.4), margins=(0.7, 0.15, 0.5, 0.8))
    for split in (name for name in SPLIT_COLORS if name in splits):
        steps, _, values = splits[split]
        look: dict[str, Any] = {"color": SPLIT_COLORS[split]}
        if split == "test":
            axes.plot(steps[-1:], values[-1:], "*", markersize=12, label=f"test {values[-1]:.4f}", zorder=5, **look)
        elif split == "train" and len(values) > 2 * NUM_SMOOTHED:
            axes.plot(steps, values, alpha=0.25, linewidth=0.8, **look)
            axes.plot(*thin(steps, values, NUM_SMOOTHED), label="train, smoothed", **look)
        else:
            marker = "o" if len(values) < 60 else None
            axes.plot(steps, values, marker=marker, markersize=3, label=split, **look)
    if best_step is not None:
        axes.axvline(best_step, color="#888888", linestyle=":", linewidth=1, label=f"best, step {best_step}")
    if kind == "loss" and all((values[np.isfinite(values)] > 0).all() for _, _, values in splits.values()):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        axes.tick_params(which="minor", color=style.LINE, labelcolor=style.INK, labelsize=8.5)
    axes.set(xlabel="step", ylabel=kind)
    axes.legend(frameon=False, fontsize=8.5)
    return figure
