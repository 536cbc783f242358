"""Makes matplotlib figures with this house's look, of a size and a title, and saves them as PNG files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1f2430", "#6b7280", "#d5d9e0"
BLUE, ORANGE, GREEN, RED = "#3b6fd4", "#e08330", "#3a9e5c", "#cc4040"
#: of up to ten classes or targets; told apart also by those who see red and green as one (Okabe and Ito's, 2008, and grey)
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a800", "#7a4fb5", "#8c6239", "#7f7f7f"),
)
HEAD = 1.0  # inches, of the two or three lines above all panels


def new(width: float, height: float, *, title: str, figure_of: str) -> Figure:
    """Make a figure of this size in inches. title: of the run, one or two lines; figure_of: its topic. They take HEAD inches."""
    from matplotlib.figure import Figure  # heavy; pyplot would keep global state

    figure = Figure(figsize=(width, height))
    most = int(width * 12.8)
    lines = textwrap.wrap(" ".join(title.split()), most, max_lines=2, placeholder=" …")
    heading = cut(figure_of, int(most * 0.82))
    figure.text(0.16 / width, 1 - 0.26 / height, heading, fontsize=12, color=INK, weight="bold")
    for number, line in enumerate(lines):
        at = 1 - (0.49 + 0.19 * number) / height
        figure.text(0.16 / width, at, cut(line, most), fontsize=9, color=MUTED)
    return figure


def inside(
    figure: Figure,
    *,
    left: float,
    right: float,
    bottom: float,
    top: float = HEAD,
    gap: float = 0.0,
    row_gap: float = 0.0,
) -> dict[str, float]:
    """Margins in inches as matplotlib takes them; fixed ones: laying out by what is drawn takes as long as drawing."""
    width, height = figure.get_size_inches()
    return {
        "left": left / width,
        "right": 1 - right / width,
        "bottom": bottom / height,
        "top": 1 - top / height,
        "wspace": gap,
        "hspace": row_gap,
    }


def plain(axes: Any, *, grid: bool = True) -> None:
    """The look of every panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    axes.tick_params(color=LINE, labelcolor=INK, labelsize=8.5)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)
    axes.title.set(color=INK, fontsize=10)
    if grid:
        axes.grid(color=LINE, linewidth=0.6, alpha=0.7)
        axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def color(number: int, of: int) -> Any:
    """A color for each of `of` classes; beyond ten they are shades of one scale."""
    if of <= len(COLORS):
        return COLORS[number]
    import matplotlib

    return matplotlib.colormaps["turbo"](0.04 + 0.92 * number / (of - 1))


def cut(text: str, most: int) -> str:
    """Cut a text to one line of at most `most` characters, without matplotlib's markup."""
    text = " ".join(text.split())
    text = text if len(text) <= most else text[: max(1, most - 1)].rstrip() + "…"
    return text.replace("$", r"\$")


def names_of(names: Sequence[str], count: int, *, what: str = "") -> list[str]:
    """As many names: those that are given, or numbers."""
    return [str(name) for name in names] if len(names) == count else [f"{what}{number}" for number in range(count)]
