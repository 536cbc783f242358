"""What a person reads goes in; it comes out where they read, or nowhere once they have read enough."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class Terminal(Console):
    """Where a person reads. When they have closed it (`... | head`, a lost connection), the work goes on in silence."""

    def __init__(self, *, soft_wrap: bool = True) -> None:
        super().__init__(highlight=False, soft_wrap=soft_wrap)

    def on_broken_pipe(self) -> None:
        """Rich's own ends the process."""
        self.quiet = True
        leave_unread()


def leave_unread() -> None:
    """Nobody reads any more: what is still printed, and what Python flushes at its end, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
