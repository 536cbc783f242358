"""Draws where a run's time went, as two bars: the run, and its training, a piece for each name. For figures.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.experiment.plots import style

STEM = "time"  # of the picture's file
#: what is not the training's; it is grey
AROUND = {"start-up": "#9aa1ad", "tracker": "#b9bec7", "finish": "#cdd1d8", "other": "#e1e4e8"}
TRAINING = "training"
COLORS = {
    "launch": style.RED,
    "compute": style.GREEN,
    "data": style.ORANGE,
    "copies": "#b8a800",
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
#: narrower pieces have no room for their name
LEAST_NAMED, LEAST_SHOWN = 0.09, 0.01
A_LINE = 6


def draw_time(spent: Mapping[str, float], folder: Path, *, title: str, num_runs: int = 1) -> list[Path]:
    """spent: seconds by name, in the order of the run; of several runs, summed. The file, or none where nothing was trained. 0.1 s."""
    training = {name: seconds for name, seconds in spent.items() if name not in AROUND}
    total, trained = sum(spent.values()), sum(training.values())
    if not trained:
        return []
    run = {"start-up": spent.get("start-up", 0.0), TRAINING: trained}
    run |= {name: seconds for name, seconds in spent.items() if name in AROUND and name != "start-up"}
    figure = style.new(8, 2.9, title=title, figure_of=f"where {total:.1f} s went, up to the pictures")
    axes = figure.subplots(gridspec_kw=style.inside(figure, left=1.1, right=0.16, bottom=0.62, top=0.8))
    _bar(axes, 1, run)
    handles = _bar(axes, 0, training)
    whole, inner = ("the run", "its training") if num_runs == 1 else (f"{num_runs:,} runs", "their training")
    for row, label in ((1, f"{whole}\n{total:.1f} s"), (0, f"{inner}\n{trained:.1f} s")):
        axes.text(-0.012, row, label, ha="right", va="center", color=style.INK, fontsize=9)
    axes.set(xlim=(0, 1), ylim=(-0.5, 1.5))
    axes.axis("off")
    look: dict[str, Any] = {"ncol": A_LINE, "frameon": False, "fontsize": 8, "handlelength": 1, "columnspacing": 1.2}
    names = [f"{name} {training[name] / trained:.1%}" for name in handles]
    figure.legend(list(handles.values()), names, loc="lower left", bbox_to_anchor=(0.01, 0), **look)
    folder.mkdir(parents=True, exist_ok=True)
    return [style.save(figure, folder / f"{STEM}.png")]


def _bar(axes: Any, row: int, spent: Mapping[str, float]) -> dict[str, Any]:
    total, begin, pieces = sum(spent.values()), 0.0, {}
    for name, seconds in spent.items():
        share, color = seconds / total, COLORS.get(name) or AROUND[name]
        piece = axes.barh([row], [share], height=0.72, left=begin, color=color, edgecolor="white", linewidth=0.6)
        if share >= LEAST_SHOWN:
            pieces[name] = piece[0]
        if share >= LEAST_NAMED:
            ink = style.INK if name in AROUND else "white"
            words = f"{name}\n{share:.0%}"
            axes.text(begin + share / 2, row, words, ha="center", va="center", color=ink, fontsize=8.5)
        begin += share
    return pieces
