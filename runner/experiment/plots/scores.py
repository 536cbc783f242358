"""Draws how good predictions are: confusion matrix, ROC and precision-recall, calibration, residuals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results

#: up to this many classes the cells hold numbers; beyond, the worst pairs are listed
MOST_WITH_NUMBERS = 20
NUM_LISTED = 15
MOST_CHARACTERS = 18


def draw_confusion(results: Results, path: Path) -> bool:
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


#: lines that are distinguishable
MOST_CLASSES = 20
MOST_POINTS = 400


def draw_roc(results: Results, path: Path) -> bool:
    """Each class against the rest, of two classes the second; their mean (macro). Not of more than 20 classes."""
    questions = _questions(results)
    if not questions:
        return False
    is_one = len(questions) == 1
    figure = style.new(10.6, 4.75, title=results.title, figure_of=_heading(results, is_one))
    left, right = figure.subplots(
        1, 2, gridspec_kw=style.inside(figure, left=0.6, right=2.75, bottom=0.55, gap=0.22, top=1.05)
    )
    areas, precisions = [], []
    grid = np.linspace(0, 1, 201)
    mean = np.zeros_like(grid)
    for number, (name, scores, truth) in enumerate(questions):
        false, hit, precision = rates(truth, scores)
        areas.append(float((np.diff(false) * (hit[1:] + hit[:-1])).sum() / 2))
        precisions.append(float((np.diff(hit) * precision[1:]).sum()))
        mean += np.interp(grid, false, hit) / len(questions)
        look: dict[str, Any] = {"color": style.color(number, len(questions)), "linewidth": 2.0 if is_one else 1.2}
        label = f"{style.cut(name, 20)}  {areas[-1]:.3f} · {precisions[-1]:.3f}"
        left.plot(*_thin(false, hit), label=label, **look)
        right.plot(*_thin(hit, precision), drawstyle="steps-pre", **look)
    if not is_one:
        label = f"macro  {np.mean(areas):.3f} · {np.mean(precisions):.3f}"
        left.plot(grid, mean, color=style.INK, linewidth=2.2, linestyle=(0, (4, 2)), label=label)
    left.plot([0, 1], [0, 1], color=style.MUTED, linewidth=0.8, linestyle=":")
    left.set(xlabel="false positive rate", ylabel="true positive rate", title="ROC")
    right.set(xlabel="recall", ylabel="precision", title="Precision and recall")
    for axes in (left, right):
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        style.plain(axes)
    size = 8 if len(questions) <= 16 else 7
    width, height = figure.get_size_inches()
    figure.legend(
        loc="upper left",
        bbox_to_anchor=(1 - 2.7 / width, 1 - 0.95 / height),
        frameon=False,
        fontsize=size,
        title="area · average precision",
        title_fontsize=8,
        labelspacing=0.35,
    )
    style.save(figure, path)
    return True


def rates(truth: NDArray[np.bool_], scores: NDArray[np.float32]) -> tuple[NDArray[np.float64], ...]:
    """(K,) each, for ever lower thresholds: the false positive rate, the true positive rate or recall, the precision.

    From above all scores, where nothing is taken, to the lowest; equal scores are taken together. Areas below are those of
    sklearn.metrics, which takes 1.4 s to import. Raises: ValueError for scores that are not finite.
    """
    if not np.isfinite(scores).all():
        raise ValueError("scores that are not finite have no order")
    order = np.argsort(-scores, kind="stable")
    last_of_equals = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    taken = last_of_equals + 1.0
    hits = np.cumsum(truth[order])[last_of_equals]
    false, hit = (taken - hits) / (~truth).sum(), hits / truth.sum()
    return np.append(0.0, false), np.append(0.0, hit), np.append(1.0, hits / taken)


def _heading(results: Results, is_one: bool) -> str:
    if is_one and results.kind == "multiclass":
        return f"ROC and precision-recall of {style.names_of(results.classes, 2)[1]}"
    return f"ROC and precision-recall of each {'label' if results.kind == 'multilabel' else 'class'}"


def _questions(results: Results) -> list[tuple[str, NDArray[np.float32], NDArray[np.bool_]]]:
    if results.predictions.ndim != 2 or not 1 <= results.predictions.shape[1] <= MOST_CLASSES:
        return []
    count = results.predictions.shape[1]
    is_multilabel = results.kind == "multilabel"
    names = style.names_of(results.names if is_multilabel else results.classes, count)
    found = []
    for number in range(count) if is_multilabel or count != 2 else [1]:
        truth = np.asarray(results.targets[:, number] == 1 if is_multilabel else results.targets == number)
        if truth.any() and not truth.all():
            found.append((names[number], results.predictions[:, number], truth))
    return found


def _thin(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if len(x) <= MOST_POINTS:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, MOST_POINTS).astype(np.int64))
    return x[kept], y[kept]


NUM_BINS = 15


def draw_calibration(results: Results, path: Path) -> bool:
    """Of classes the one that is said and its probability; of labels each. Below: how many rows are so sure."""
    found = _answers(results)
    if found is None:
        return False
    sure, right = found
    counts, confidence, accuracy, error = reliability(sure, right)
    figure = style.new(5.6, 5.8, title=results.title, figure_of=f"Calibration, expected error {error:.4f}")
    grid = style.inside(figure, left=0.65, right=0.25, bottom=0.55, row_gap=0.12)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={**grid, "height_ratios": (3.4, 1)})
    edges = np.linspace(0, 1, NUM_BINS + 1)
    is_there = counts > 0
    middle, width = (edges[:-1] + edges[1:]) / 2, 0.92 / NUM_BINS
    above.bar(middle[is_there], accuracy[is_there], width=width, color=style.BLUE, alpha=0.85, label="right")
    gap: dict[str, Any] = {"bottom": np.minimum(accuracy, middle)[is_there], "color": "none", "edgecolor": style.RED}
    above.bar(middle[is_there], np.abs(accuracy - middle)[is_there], width=width, hatch="////", linewidth=0, **gap)
    above.plot([0, 1], [0, 1], color=style.MUTED, linewidth=1, linestyle=":", label="perfect")
    above.plot(confidence[is_there], accuracy[is_there], "o", color=style.INK, markersize=3.5, label="mean of the bin")
    above.set(ylabel=_axis_labels(results)[1], ylim=(0, 1.02), xlim=(0, 1))
    above.legend(loc="upper left", frameon=False, fontsize=8)
    below.bar(middle, counts, width=width, color=style.MUTED)
    below.set(xlabel=_axis_labels(results)[0], ylabel="rows" if results.kind != "multilabel" else "labels")
    if counts.max() > 30 * max(1, np.median(counts[is_there])):
        below.set_yscale("log")
    for axes in (above, below):
        style.plain(axes)
    style.save(figure, path)
    return True


def reliability(
    sure: NDArray[np.float32], right: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], float]:
    """By bin of equal width: rows, mean probability, share that is right; and the expected calibration error (Guo et al.
    2017): the mean distance of the two, by rows."""
    bins = np.clip(np.ceil(sure.astype(np.float64) * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)  # (low, high]
    counts = np.bincount(bins, minlength=NUM_BINS)
    confidence = np.bincount(bins, sure, NUM_BINS) / np.maximum(counts, 1)
    accuracy = np.bincount(bins, right, NUM_BINS) / np.maximum(counts, 1)
    error = float((counts * np.abs(confidence - accuracy)).sum() / max(1, counts.sum()))
    return counts, confidence, accuracy, error


def _answers(results: Results) -> tuple[NDArray[np.float32], NDArray[np.bool_]] | None:
    predictions, targets = results.predictions, results.targets
    if predictions.ndim != 2:
        return None
    if results.kind == "multilabel":
        return predictions.reshape(-1), np.asarray(targets == 1).reshape(-1)
    if predictions.shape[1] == 2:
        return predictions[:, 1], np.asarray(targets == 1)
    return predictions.max(1), np.asarray(predictions.argmax(1) == targets)


def _axis_labels(results: Results) -> tuple[str, str]:
    if results.kind == "multilabel":
        return "predicted probability", "share of labels that are so"
    if results.predictions.shape[1] == 2:
        name = style.cut(style.names_of(results.classes, 2)[1], 20)
        return f"probability of {name}", f"share that is {name}"
    return "probability of the predicted class", "share that is right"


MOST_TARGETS = 6
MANY_ROWS = 3000


def draw_residuals(results: Results, path: Path) -> bool:
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
