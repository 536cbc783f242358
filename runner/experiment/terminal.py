"""Prints text for the terminal: numbers in at most 10 characters, harmless control characters, a closed pipe ignored."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from runner.errors import RunnerError, harmless, in_words, leave_unread, on_a_line, traceback_of, without_password

#: for an output that is not Unicode
ASCII = str.maketrans({"✓": "+", "✗": "x", "·": "-", "…": "~", "━": "-", "╸": "-", "±": "+-"})
LABEL = re.compile(r"[a-z]{1,7}(?= {2,}\S)")


class Terminal(Console):
    """The terminal of the user. When it is closed (`... | head`, a lost connection), the work continues silently."""

    def __init__(self, *, soft_wrap: bool = True, file: IO[str] | None = None) -> None:
        """Open stdout (file=None) or a file."""
        super().__init__(highlight=False, soft_wrap=soft_wrap, file=file)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Spell out control characters in texts, and replace characters that the output can't encode."""
        is_unicode = self.encoding.startswith("utf")
        for text, style, control in super().render(renderable, options):
            shown = text if control else harmless(text)
            if not is_unicode and not control:
                shown = shown.translate(ASCII).encode(self.encoding, "backslashreplace").decode(self.encoding)
            yield Segment(shown, style, control)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        leave_unread()


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Iterable[int] = ()) -> Table:
    """Return a table of texts. right: the columns that are aligned right."""
    table, numbers = Table(box=None, pad_edge=False, header_style="bold"), set(right)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number in numbers else "left", overflow="fold")
    for cells in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line for each row of cells. right: all but the first column are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if right and number else str.ljust for number in range(len(widths))]
    return ["  ".join(map(lambda side, *cell: side(*cell), sides, row, widths)).rstrip() for row in rows]


def row(label: str, text: str) -> str:
    """Return a line that begins with a label."""
    return f"{label:<8} {text}"


def labeled(text: str) -> Text:
    """Return a text in which the label of row() is bold."""
    shown = Text(text)
    if (label := LABEL.match(text)) is not None and text[8:9] == " ":
        shown.stylize("bold", 0, label.end())
    return shown


def say(text: str) -> None:
    """Print text that may contain names or errors from elsewhere; control characters are spelled out."""
    print(harmless(text))


def short(folder: Path) -> str:
    """Return a path relative to the current directory if it is below it."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


WIDTH = 10


def readable(value: float) -> str:
    """Format a number: 0.9832, 1,234.5, 6.285e+10, nan. Only 1 is shown as 1: an accuracy of 0.99999 keeps its digits."""
    size = abs(value)
    if not math.isfinite(value):
        return str(float(value))
    if size != 0 and (size < 1e-3 or size >= 999_999.95):
        return f"{value:.3e}"
    if size >= 99.99995:
        return f"{value:,.1f}"
    if 0.99995 <= size < 1:
        return f"{math.copysign(math.floor(size * 1e7) / 1e7, value):.7g}"
    return f"{value:.4f}"


def seconds(duration: float | None) -> str:
    """Format a duration: 8.41 s, 85 s, 12 min 5 s, 3 h 12 min."""
    if duration is None:
        return ""
    if duration < 120:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.0f} s"
    minutes, rest = divmod(round(duration), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def print_failure(error: BaseException) -> str:
    """Print an error, an unexpected one with its traceback. Returns it on one line, for a summary."""
    if isinstance(error, RunnerError):
        say(f"\n{error}")
        return on_a_line(error)
    print(traceback_of(error), file=sys.stderr)
    return without_password(in_words(error))
