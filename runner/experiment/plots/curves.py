"""Draws a run's curves, a plot for each kind of value, and where its time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.plots import style
from runner.tasks.metric_names import PLOTS
from runner.tracking.journal_reader import Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEM = "time"  # of the plot's file
#: not part of the training; grey
AROUND = {"start-up": "#9aa1ad", "tracker": "#b9bec7", "finish": "#cdd1d8", "other": "#e1e4e8"}
TRAINING = "training"
COLORS = {
    "launch": style.RED,
    "compute": style.GREEN,
    "data": style.ORANGE,
    "metrics": "#8c6239",
    "validation": style.BLUE,
    "test": "#56b4e9",
    "checkpoints": "#7a4fb5",
    "disk": "#cc79a7",
    "hooks": "#4f9a94",
    "warm-up": "#e6b800",
    "steps": style.GREEN,
    TRAINING: style.INK,
}
MIN_NAMED, MIN_IN_LEGEND = 0.09, 0.01  # shares


def draw_time(spent: Mapping[str, float], folder: Path, *, title: str, num_runs: int = 1) -> list[Path]:
    """Draw where the time went, and return the file; no file if nothing was trained. 0.1 s.

    spent: Seconds by name, in the order of the run; of several runs, summed.
    """
    training = {name: seconds for name, seconds in spent.items() if name not in AROUND}
    total, trained = sum(spent.values()), sum(training.values())
    if not trained:
        return []
    run = {"start-up": spent.get("start-up", 0.0), TRAINING: trained}
    run |= {name: seconds for name, seconds in spent.items() if name in AROUND and name != "start-up"}
    heading, margins = f"Where {total:.1f} s went, up to the plots", (1.1, 0.16, 0.62, 0.8)
    figure, (axes,) = style.panels(title, heading, (8, 2.9), margins=margins, has_grid=False)
    whole, inner = ("the run", "its training") if num_runs == 1 else (f"{num_runs:,} runs", "their training")
    for row, label, parts in ((1, f"{whole}\n{total:.1f} s", run), (0, f"{inner}\n{trained:.1f} s", training)):
        axes.text(-0.012, row, label, ha="right", va="center", color=style.INK, fontsize=9)
        handles = _bar(axes, row, parts)
    axes.set(xlim=(0, 1), ylim=(-0.5, 1.5))
    axes.axis("off")
    look: dict[str, Any] = {"ncol": 6, "frameon": False, "fontsize": 8, "handlelength": 1, "columnspacing": 1.2}
    names = [f"{name} {training[name] / trained:.1%}" for name in handles]
    figure.legend(list(handles.values()), names, loc="lower left", bbox_to_anchor=(0.01, 0), **look)
    folder.mkdir(parents=True, exist_ok=True)
    return [style.save(figure, folder / f"{STEM}.png")]


def _bar(axes: Any, row: int, spent: Mapping[str, float]) -> dict[str, Any]:
    total, begin, pieces = sum(spent.values()), 0.0, {}
    for name, seconds in spent.items():
        share, color = seconds / total, COLORS.get(name) or AROUND[name]
        piece = axes.barh([row], [share], height=0.72, left=begin, color=color, edgecolor="white", linewidth=0.6)
        if share >= MIN_IN_LEGEND:
            pieces[name] = piece[0]
        if share >= MIN_NAMED:
            ink = style.INK if name in AROUND else "white"
            text = f"{name}\n{share:.0%}"
            axes.text(begin + share / 2, row, text, ha="center", va="center", color=ink, fontsize=8.5)
        begin += share
    return pieces


#: of a curve: more than a screen has pixels
MAX_POINTS = 2000
SPLIT_COLORS = {"train": "#4878d0", "val": "#ee854a", "test": "#2f2f2f"}


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
    kinds = {kind: splits for kind, splits in kinds.items() if any(len(series[0]) > 1 for series in splits.values())}
    folder.mkdir(parents=True, exist_ok=True)
    stems, drawn = _stems(kinds), []
    for kind, splits in kinds.items():
        step = best[1] if best and best[0].partition("/")[2] == kind else None
        drawn.append(style.save(_draw(kind, splits, title=title, best_step=step), folder / f"{stems[kind]}.png"))
    return drawn


def _stems(kinds: Iterable[str]) -> dict[str, str]:
    taken = {STEM, *(name for names in PLOTS.values() for name in names)}
    stems: dict[str, str] = {}
    for kind in sorted(kinds, key=lambda kind: ("/" in kind or kind in taken, kind)):  # whose name is free comes first
        stem = kind.replace("/", "_")
        while stem in taken or stem in stems.values():
            stem += "_curve"
        stems[kind] = stem
    return stems


def _draw(kind: str, splits: Mapping[str, Series], *, title: str, best_step: int | None) -> Figure:
    figure, (axes,) = style.panels(title, kind, (7, 4.4), margins=(0.7, 0.15, 0.5, 0.8))
    for split in (name for name in SPLIT_COLORS if name in splits):
        steps, _, values = splits[split]
        look: dict[str, Any] = {"color": SPLIT_COLORS[split]}
        if split == "test":
            axes.plot(steps[-1:], values[-1:], "*", markersize=12, label=f"test {values[-1]:.4f}", zorder=5, **look)
        elif split == "train" and len(values) > 50:
            axes.plot(*_thinned(steps, values), alpha=0.25, linewidth=0.8, **look)
            axes.plot(*_smoothed(steps, values), label="train, smoothed", **look)
        else:
            marker = "o" if len(values) < 60 else None
            axes.plot(*_thinned(steps, values), marker=marker, markersize=3, label=split, **look)
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


def _smoothed(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Return moving means over a 25th of the curve, of at most MAX_POINTS equal pieces."""
    begins = np.arange(0, len(values), -(-len(values) // MAX_POINTS))
    finite = np.isfinite(values)
    window = np.ones(max(3, len(begins) // 25) // 2 * 2 + 1)
    sums, counts = (
        np.convolve(np.add.reduceat(each.astype(np.float64), begins), window, "same")
        for each in (np.where(finite, values, 0.0), finite)
    )
    return steps[begins], sums / np.maximum(counts, 1)


def _thinned(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the lowest and the highest value of each piece, so that a spike of one step is drawn."""
    stride = 2 * len(steps) // MAX_POINTS
    if stride < 3:
        return steps, values
    begins = np.arange(0, len(values), stride)
    kept = []
    for each in (values, -values):
        padded = np.full(len(begins) * stride, np.inf)
        padded[: len(values)] = np.where(np.isnan(values), np.inf, each)
        kept.append(begins + padded.reshape(-1, stride).argmin(1))
    places = np.unique(np.concatenate([[0], *kept, [len(values) - 1]]))
    return steps[places], values[places]
