"""Draws plan.png, the memory over a step by part with what there is to be used, and a range test's loss over the rate.

Called by command.py and lr_find.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from runner.plan.lr_curve import Found

COLORS = {
    "weights": "#4878d0",
    "average": "#82c6e2",
    "optimizer": "#956cb4",
    "data set": "#8c613c",
    "batch": "#d5bb67",
    "metric buffer": "#797979",
    "gradients": "#ee854a",
    "activations": "#6acc64",
    "temporaries": "#d65f5f",
    "other": "#b0b0b0",
}
MIB, GIB = 2**20, 2**30


def draw(plans: Sequence[dict[str, Any]], file: Path) -> None:
    """A PNG, a panel for each plan."""
    from matplotlib.figure import Figure  # heavy; pyplot would keep global state

    drawing = Figure(figsize=(9, 3.6 * len(plans)), layout="constrained")
    panels = drawing.subplots(len(plans), 1, squeeze=False)[:, 0]
    for panel, plan in zip(panels, plans, strict=True):
        _panel(panel, plan)
    drawing.savefig(file, dpi=110)


def _panel(axes: Any, plan: dict[str, Any]) -> None:
    memory = plan["memory"]
    moments = memory["timeline"]
    highest = memory["peak_bytes"]
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    parts = [part for part in COLORS if any(moment["parts"].get(part) for moment in moments)]
    places = range(len(moments))
    heights = [[moment["parts"].get(part, 0) / unit for moment in moments] for part in parts]
    axes.stackplot(places, heights, labels=parts, colors=[COLORS[part] for part in parts], step="post", linewidth=0)
    top = highest / unit
    usable = memory.get("usable_bytes")
    if usable and usable < 4 * highest:
        axes.axhline(usable / unit, color="#c00000", linestyle="--", linewidth=1)
        axes.annotate("to be used", (0, usable / unit), xytext=(3, 3), textcoords="offset points", color="#c00000")
        top = max(top, usable / unit)
    start = 0
    for phase, group in groupby(moments, key=lambda moment: moment["phase"]):
        count = len(list(group))
        if start:
            axes.axvline(start, color="white", linewidth=1)
        if count > len(moments) / 30:
            axes.annotate(phase, (start + count / 2, top * 1.1), ha="center", va="center", fontsize=9, color="#555555")
        start += count
    axes.set(xlim=(0, max(1, len(moments) - 1)), ylim=(0, top * 1.2), ylabel=f"memory, {name}", xticks=[])
    whole = "evaluated batch" if memory["peak_phase"] == "evaluation" else "step"
    axes.set_xlabel(f"operations of one {whole}, in their order")
    title = (
        f"{plan['name'] or f'one {whole}'} on {plan['device']}: {highest / unit:.3g} {name} at most, {plan['verdict']}"
    )
    axes.set_title(title, fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_range_test(found: Found, path: Path, *, title: str) -> None:
    """A PNG, about 0.3 s: the loss over the learning rate, with the rates that are worth a try."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.98, "top": 0.92, "bottom": 0.13})
    axes.plot(found.rates, found.losses, color="#4878d0", alpha=0.3, linewidth=0.9, label="loss")
    axes.plot(found.rates, found.smoothed, color="#4878d0", linewidth=1.8, label="smoothed")
    marks = (
        (found.steepest, "#6acc64", "falls fastest"),
        (found.tenth_of_lowest, "#ee854a", "a tenth of the lowest's"),
    )
    for rate, color, name in marks:
        taken = ", taken" if rate == found.suggested else ""
        axes.axvline(rate, color=color, linestyle="--", linewidth=1.3, label=f"{name}: {rate:.1e}{taken}")
    low = float(min(found.smoothed.min(), found.losses.min()))
    high = float(found.smoothed[: max(3, len(found.smoothed) // 4)].max())
    spread = max(high - low, 1e-12)
    # where it runs away is seen from the line that leaves the picture; all of it would press the rest flat
    axes.set_ylim(low - 0.15 * spread, high + 0.6 * spread)
    axes.set_xscale("log")
    axes.set(title=title, xlabel="learning rate", ylabel="training loss")
    axes.set_xlim(float(np.min(found.rates)), float(np.max(found.rates)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, loc="upper left" if found.suggested > np.sqrt(found.rates[0] * found.rates[-1]) else "best"
    )
    figure.savefig(path, dpi=120)
