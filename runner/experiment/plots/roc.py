"""Draws ROC and precision-recall curves, a line for each class, from probabilities and what is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results

#: lines that can be told apart
MOST_CLASSES = 20
MOST_POINTS = 400


def draw(results: Results, path: Path) -> bool:
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
