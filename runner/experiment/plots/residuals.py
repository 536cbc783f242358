"""Draws predicted numbers against true ones, and their differences below, a panel for each target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results

MOST_TARGETS = 6
MANY_ROWS = 3000


def draw(results: Results, path: Path) -> bool:
    """Above, predicted against true; below, what is left (predicted - true) against predicted. The first six targets."""
    predictions, targets = results.predictions, results.targets
    if predictions.ndim != 2 or predictions.shape != targets.shape:
        return False
    count = min(MOST_TARGETS, predictions.shape[1])
    names = style.names_of(results.names, predictions.shape[1], what="target ")
    heading = "Predicted against true"
    if predictions.shape[1] > count:
        heading += f", {count} of {predictions.shape[1]} targets"
    columns = min(3, count)
    rows = -(-count // columns)
    figure = style.new(max(5.6, 0.9 + 3.8 * columns), 1.0 + 5.3 * rows, title=results.title, figure_of=heading)
    grid = style.inside(figure, left=0.85, right=0.25, bottom=0.6, top=1.25, gap=0.3, row_gap=0.42)
    axes = figure.subplots(2 * rows, columns, squeeze=False, gridspec_kw={**grid, "height_ratios": (2.1, 1) * rows})
    for number in range(rows * columns):
        row, column = divmod(number, columns)
        above, below = axes[2 * row, column], axes[2 * row + 1, column]
        if number >= count:
            above.set_axis_off()
            below.set_axis_off()
            continue
        single = predictions.shape[1] == 1 and not results.names
        _panel(above, below, predictions[:, number], targets[:, number], "" if single else names[number])
    style.save(figure, path)
    return True


def _panel(above: Any, below: Any, said: NDArray[Any], true: NDArray[Any], name: str) -> None:
    said, true = said.astype(np.float64), true.astype(np.float64)
    left = said - true
    root, mean = np.sqrt((left**2).mean()), np.abs(left).mean()
    spread = ((true - true.mean()) ** 2).sum()
    fit = f"R² {1 - (left**2).sum() / spread:.3f}, " if spread > 0 else ""
    both = np.concatenate([said, true])
    low, high = both.min(), both.max()
    room = 0.04 * (high - low) or 1.0
    ends = low - room, high + room
    _dots(above, true, said)
    above.plot(ends, ends, color=style.INK, linewidth=1, linestyle=":")
    above.set(xlim=ends, ylim=ends, xlabel="true", ylabel="predicted")
    shown = f"{style.cut(name, 24)}: " if name else ""
    above.set_title(f"{shown}{fit}RMSE {root:.3g}, MAE {mean:.3g}", loc="left", fontsize=9)
    _dots(below, said, left)
    below.axhline(0, color=style.INK, linewidth=1, linestyle=":")
    below.set(xlabel="predicted", ylabel="predicted - true")
    for axes in (above, below):
        style.plain(axes)
        axes.locator_params(nbins=6)


def _dots(axes: Any, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    is_many = len(x) > MANY_ROWS
    alpha = 0.15 if is_many else 0.45 if len(x) > 300 else 0.75
    axes.plot(x, y, "o", markersize=2.2 if is_many else 3.2, markeredgewidth=0, alpha=alpha, color=style.BLUE)
