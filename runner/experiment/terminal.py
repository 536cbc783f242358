"""Prints text for the terminal: control characters are spelled out, and a closed pipe (`| head`) is ignored."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from runner.errors import harmless

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


def row(label: str, text: str) -> str:
    """A line with a label."""
    return f"{label:<8} {text}"


def labeled(text: str) -> Text:
    """A text whose label, if it has one (see row()), is bold."""
    shown = Text(text)
    if (label := LABEL.match(text)) is not None and text[8:9] == " ":
        shown.stylize("bold", 0, label.end())
    return shown


def say(text: str) -> None:
    """One or several lines, as they are, that hold names or errors from elsewhere."""
    print(harmless(text))


def leave_unread() -> None:
    """Nobody reads any more: what is still printed, and what Python flushes at its end, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def short(folder: Path) -> str:
    """A folder as a person reads it: from the current one, where it lies below it."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
