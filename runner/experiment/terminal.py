"""Prints for a person, with control characters in texts spelled out; falls silent once nobody reads any more (`| head`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from runner.errors import harmless


class Terminal(Console):
    """Where a person reads. When they have closed it (`... | head`, a lost connection), the work goes on in silence."""

    def __init__(self, *, soft_wrap: bool = True, file: IO[str] | None = None) -> None:
        """file: None for stdout."""
        super().__init__(highlight=False, soft_wrap=soft_wrap, file=file)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Texts are shown, and command nothing: the moves and colours are rich's own, which stand apart from them."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else harmless(text), style, control)

    def on_broken_pipe(self) -> None:
        """Rich's own ends the process."""
        self.quiet = True
        leave_unread()


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
