"""Real rows and generated ones go in; both come out as points of one plane, side by side."""

from __future__ import annotations

from pathlib import Path

from runner.experiment.plots import style
from runner.experiment.plots.predictions import Results

MOST_POINTS = 2000


def draw(results: Results, path: Path) -> bool:
    """Of rows of two numbers, in the same frame, which is the real ones'; what is generated outside of it, is counted."""
    generated, real = results.predictions, results.targets
    if real.ndim != 2 or real.shape[1] != 2 or generated.shape != real.shape:
        return False
    low, high = real.min(0), real.max(0)
    room = 0.25 * (high - low)
    outside = ((generated < low - room) | (generated > high + room)).any(1).mean()
    figure = style.new(8.4, 5.1, title=results.title, figure_of="Real and generated rows")
    grid = style.inside(figure, left=0.5, right=0.2, bottom=0.35, top=1.0, gap=0.12)
    panels = figure.subplots(1, 2, sharex=True, sharey=True, gridspec_kw=grid)
    said = f"generated ({outside:.1%} of them outside)" if outside else "generated"
    for axes, rows, color, title in ((panels[0], real, style.BLUE, "real"), (panels[1], generated, style.ORANGE, said)):
        rows = rows[:MOST_POINTS]
        axes.plot(rows[:, 0], rows[:, 1], "o", markersize=2.4, markeredgewidth=0, alpha=0.5, color=color)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_aspect("equal")
        style.plain(axes)
    panels[0].set(xlim=(low[0] - room[0], high[0] + room[0]), ylim=(low[1] - room[1], high[1] + room[1]))
    style.save(figure, path)
    return True
