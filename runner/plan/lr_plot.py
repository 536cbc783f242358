"""Draws a range test: the loss over the learning rate, with the rates that are worth a try."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runner.plan.lr_curve import Found


def draw(found: Found, path: Path, *, title: str) -> None:
    """A PNG, about 0.3 s."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy; pyplot would keep global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
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
