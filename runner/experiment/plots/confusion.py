"""Draws the confusion matrix, from classes that were said and that are so; readable with 2 and with 100 classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results

#: up to so many classes the cells hold numbers; beyond, the worst pairs are listed beside
MOST_WITH_NUMBERS = 20
NUM_LISTED = 15
MOST_CHARACTERS = 18


def draw(results: Results, path: Path) -> bool:
    """Rows are what is so; a cell's shade is its share of the row. Above: the accuracy."""
    if results.predictions.ndim != 2 or results.targets.ndim != 1:
        return False
    count = results.predictions.shape[1]
    said, true = results.predictions.argmax(1), results.targets.astype(np.int64)
    matrix = np.bincount(true * count + said, minlength=count * count).reshape(count, count)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    names = style.names_of(results.classes, count)
    heading = f"Confusion matrix, accuracy {np.trace(matrix) / max(1, matrix.sum()):.4f}"
    has_numbers = count <= MOST_WITH_NUMBERS
    longest = max(len(style.cut(name, MOST_CHARACTERS)) for name in names)
    label = 0.3 + 0.09 * longest
    below = label if longest > 3 else 0.25
    side = min(8.2, max(2.7, 0.52 * count)) if has_numbers else 7.0
    beside = 0.35 if has_numbers else 4.0
    left = label + 0.4
    width, height = max(left + side + beside, 5.2), style.HEAD + side + below + 0.45
    figure = style.new(width, height, title=results.title, figure_of=heading)
    axes = figure.add_axes((left / width, (below + 0.4) / height, side / width, side / height))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="equal", interpolation="nearest")
    _name(axes, names, step=1 if has_numbers else -(-count // 34))
    if has_numbers:
        _number(axes, matrix, shares)
    else:
        _list(figure, matrix, shares, names, left=(left + side + 0.3) / width, height=height)
    axes.set(xlabel="predicted", ylabel="true")
    style.plain(axes, grid=False)
    axes.spines[:].set_visible(False)
    style.save(figure, path)
    return True


def _name(axes: Any, names: list[str], *, step: int) -> None:
    at = np.arange(0, len(names), step)
    shown = [style.cut(names[number], MOST_CHARACTERS) for number in at]
    is_short = max(map(len, shown)) <= 3
    axes.set_xticks(at, shown, rotation=0 if is_short else 90)
    axes.set_yticks(at, shown)
    axes.tick_params(length=0)


def _number(axes: Any, matrix: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    count = len(matrix)
    for row, column in zip(*np.nonzero(matrix), strict=True):
        share = shares[row, column]
        text = f"{matrix[row, column]}" if count > 12 else f"{matrix[row, column]}\n{share:.0%}"
        color = "white" if share > 0.55 else style.INK
        size = 9 if count <= 6 else 7.5 if count <= 12 else 6.5
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=size, linespacing=1.1)


def _list(
    figure: Any, matrix: NDArray[np.int64], shares: NDArray[np.float64], names: list[str], *, left: float, height: float
) -> None:
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:NUM_LISTED]
    pairs = [divmod(int(number), len(matrix)) for number in order if wrong.flat[number]]
    figure.text(
        left, 1 - 1.15 / height, "Most often wrong" if pairs else "Nothing is wrong", fontsize=10, weight="bold"
    )
    for line, (true, said) in enumerate(pairs):
        at = 1 - (1.47 + 0.42 * line) / height
        text = f"{style.cut(names[true], 16)} → {style.cut(names[said], 16)}"
        figure.text(left, at, text, fontsize=8.5, color=style.INK)
        note = f"{matrix[true, said]} times, {shares[true, said]:.0%} of its rows"
        figure.text(left, at - 0.165 / height, note, fontsize=7.5, color=style.MUTED)
