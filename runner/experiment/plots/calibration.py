"""Draws the reliability diagram, from probabilities and what is so: how often a model is right that is so sure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results

NUM_BINS = 15


def draw(results: Results, path: Path) -> bool:
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
    above.set(ylabel=_said(results)[1], ylim=(0, 1.02), xlim=(0, 1))
    above.legend(loc="upper left", frameon=False, fontsize=8)
    below.bar(middle, counts, width=width, color=style.MUTED)
    below.set(xlabel=_said(results)[0], ylabel="rows" if results.kind != "multilabel" else "labels")
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


def _said(results: Results) -> tuple[str, str]:
    if results.kind == "multilabel":
        return "predicted probability", "share of labels that are so"
    if results.predictions.shape[1] == 2:
        name = style.cut(style.names_of(results.classes, 2)[1], 20)
        return f"probability of {name}", f"share that is {name}"
    return "probability of the predicted class", "share that is right"
