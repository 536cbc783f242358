"""Draws a run's curves from its points: a picture for each kind of value, its splits together. For figures.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style, time_bar
from runner.tasks.metric_names import PLOTS
from runner.tracking.journal_reader import Series

#: wide enough for a screen; more points than pixels say nothing
MOST_POINTS = 2000


def draw_curves(
    points: Mapping[str, Series], folder: Path, *, title: str, best: tuple[str, int] | None = None
) -> list[Path]:
    """One picture for each kind of value (loss, accuracy, ...), its splits together; returns the files, about 0.3 s each.

    best: the metric and the step of the kept weights, marked in its picture.
    """
    kinds: dict[str, dict[str, Series]] = {}
    for name, series in points.items():
        split, _, kind = name.partition("/")
        if split in ("train", "val", "test") and len(series[0]) > 0:
            kinds.setdefault(kind, {})[split] = series
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    kinds = {kind: splits for kind, splits in kinds.items() if any(len(series[0]) > 1 for series in splits.values())}
    stems = _stems(kinds)
    for kind, splits in kinds.items():
        mark = best[1] if best and best[0].partition("/")[2] == kind else None
        drawn.append(_draw(kind, splits, folder / f"{stems[kind]}.png", title=title, mark=mark))
    return drawn


def _stems(kinds: Iterable[str]) -> dict[str, str]:
    taken = {time_bar.STEM, *(name for names in PLOTS.values() for name in names)}
    stems: dict[str, str] = {}
    for kind in sorted(kinds, key=lambda kind: ("/" in kind or kind in taken, kind)):  # whose name is free comes first
        stem = kind.replace("/", "_")
        while stem in taken or stem in stems.values():
            stem += "_curve"
        stems[kind] = stem
    return stems


def _draw(kind: str, splits: Mapping[str, Series], path: Path, *, title: str, mark: int | None) -> Path:
    from matplotlib.figure import Figure  # heavy; pyplot would keep global state

    figure = Figure(figsize=(7, 4))
    # fixed margins: laying out by what is drawn takes as long as drawing it, 0.1 s, in every job of a sweep
    axes = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.98, "top": 0.92, "bottom": 0.13})
    colors = {"train": "#4878d0", "val": "#ee854a", "test": "#2f2f2f"}
    positive = True
    for split in (name for name in colors if name in splits):
        steps, _, values = splits[split]
        positive = positive and bool((values[np.isfinite(values)] > 0).all())
        if split == "test":
            axes.plot(
                steps[-1:],
                values[-1:],
                "*",
                color=colors[split],
                markersize=12,
                label=f"test {values[-1]:.4f}",
                zorder=5,
            )
        elif split == "train" and len(values) > 50:
            axes.plot(*_thinned(steps, values), color=colors[split], alpha=0.25, linewidth=0.8)
            axes.plot(*_thinned(steps, _smooth(values)), color=colors[split], label="train, smoothed")
        else:
            axes.plot(
                *_thinned(steps, values),
                marker="o" if len(values) < 60 else None,
                markersize=3,
                color=colors[split],
                label=split,
            )
    if mark is not None:
        axes.axvline(mark, color="#888888", linestyle=":", linewidth=1, label=f"best, step {mark}")
    if kind == "loss" and positive:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set(title=title, xlabel="step", ylabel=kind)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return style.save(figure, path)


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = np.isfinite(values)
    half = max(3, len(values) // 25) // 2
    means: NDArray[np.float64] = _around(np.where(finite, values, 0.0), half) / np.maximum(_around(finite, half), 1)
    return means


def _around(values: NDArray[Any], half: int) -> NDArray[np.float64]:
    """At each place the sum of the values up to `half` places away.

    It is put together from sums of 1, 2, 4, ... neighbours, so that a huge value is in those sums alone that it belongs to:
    the difference of two sums from the beginning has lost all that is smaller than its last digit. A convolution took 4 s
    for 500,000 values.
    """
    count, width = len(values), 2 * half + 1
    found = np.zeros(count)
    sums, size, begin = np.pad(values.astype(np.float64), half), 1, 0
    while size <= width:
        if width & size:
            found += sums[begin : begin + count]
            begin += size
        sums = sums[:-size] + sums[size:]
        size *= 2
    return found


def _thinned(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of each stretch the least and the greatest value, so that a spike of one step is drawn."""
    stride = 2 * len(steps) // MOST_POINTS
    if stride < 3:
        return steps, values
    begins = np.arange(0, len(values), stride)
    kept = []
    for lowest, replaced in ((values, np.inf), (-values, np.inf)):
        padded = np.full(len(begins) * stride, replaced)
        padded[: len(values)] = np.where(np.isnan(values), replaced, lowest)
        kept.append(begins + padded.reshape(-1, stride).argmin(1))
    places = np.unique(np.concatenate([[0], *kept, [len(values) - 1]]))
    return steps[places], values[places]
