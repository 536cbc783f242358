"""Draw plan.png: the memory during a step, by part, and the usable memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30


def draw(plans: Sequence[dict[str, Any]], file: Path) -> None:
    """Return a PNG with a panel per plan."""
    from matplotlib.figure import Figure  # heavy; pyplot would keep global state

    drawing = Figure(figsize=(9, 3.6 * len(plans)), layout="constrained")
    panels = drawing.subplots(len(plans), 1, squeeze=False)[:, 0]
    for panel, plan in zip(panels, plans, strict=True):
        _panel(panel, plan)
    drawing.savefig(file, dpi=110)


def _panel(axes: Any, plan: dict[str, Any]) -> None:
    from matplotlib import color_sequences

    memory = plan["memory"]
    moments = memory["timeline"]
    highest = memory["peak_bytes"]
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    parts = list(dict.fromkeys(part for moment in moments for part in moment["parts"]))
    heights = [[moment["parts"].get(part, 0) / unit for moment in moments] for part in parts]
    axes.stackplot(range(len(moments)), heights, labels=parts, colors=color_sequences["tab20"], step="post")
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
    peak = f"{highest / unit:.3g} {name} at most"
    axes.set_title(f"{plan['name'] or f'one {whole}'} on {plan['device']}: {peak}, {plan['verdict']}", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)
