"""Makes figures with one look, of a size and a title, and saves them as PNG files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1f2430", "#6b7280", "#d5d9e0"
BLUE, ORANGE, RED = "#3b6fd4", "#e08330", "#cc4040"
#: of up to ten classes or targets, distinguishable by the color-blind (Okabe and Ito, 2008), and grey
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a800", "#7a4fb5", "#8c6239", "#7f7f7f"),
)
HEAD = 1.0  # inches, of the heading and the title above all panels


def panels(
    title: str,
    heading: str,
    size: tuple[float, float],
    *,
    shape: tuple[int, int] = (1, 1),
    margins: tuple[float, float, float, float] = (0.65, 0.25, 0.55, HEAD),
    has_grid: bool = True,
    **layout: Any,
) -> tuple[Figure, Any]:
    """Return a figure of a size in inches, and its axes row by row.

    margins: Left, right, bottom and top in inches: a layout computed from the content takes as long as drawing.
    layout: Further arguments of `Figure.subplots`.
    """
    from matplotlib.figure import Figure  # heavy; pyplot would keep global state

    (width, height), (left, right, bottom, top) = size, margins
    figure, limit = Figure(figsize=size), int(width * 12.8)
    figure.text(0.16 / width, 1 - 0.26 / height, cut(heading, int(limit * 0.82)), fontsize=12, color=INK, weight="bold")
    lines = textwrap.wrap(" ".join(title.split()), limit, max_lines=2, placeholder=" …")
    for number, line in enumerate(lines):
        at = 1 - (0.49 + 0.19 * number) / height
        figure.text(0.16 / width, at, cut(line, limit), fontsize=9, color=MUTED)
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    grid = figure.subplots(*shape, squeeze=False, **layout).reshape(-1)
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(color=LINE, labelcolor=INK, labelsize=8.5)
        axes.set_title("", y=1.0)  # a fixed height: else drawing measures all ticks first
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
            text.set(color=INK, fontsize=9.5)
        if has_grid:
            axes.grid(color=LINE, linewidth=0.6, alpha=0.7)
            axes.set_axisbelow(True)
    return figure, grid


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def cut(text: str, limit: int) -> str:
    """Cut a text to one line of at most `limit` characters, without matplotlib's markup."""
    text = " ".join(text.split())
    text = text if len(text) <= limit else text[: max(1, limit - 1)].rstrip() + "…"
    return text.replace("$", r"\$")


def names_of(names: Sequence[str], count: int, *, prefix: str = "") -> list[str]:
    """Return `count` names: those of the data, or numbers."""
    return [str(name) for name in names] if len(names) == count else [f"{prefix}{number}" for number in range(count)]
