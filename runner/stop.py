"""A signal goes in; a word to the loop comes out: finish this step, then end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody asked this run to end, and by which signal (None: nobody did)."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal, as shells have it: 130 for Ctrl-C, 143 for SIGTERM; 0 when nobody asked."""
        return 128 + self.signal if self.signal else 0


@contextmanager
def listening() -> Iterator[Stop]:
    """Turns SIGINT and SIGTERM into a Stop while it lasts. A second Ctrl-C interrupts at once, wherever the run is.

    Outside the main thread (a notebook's worker) Python takes no handlers: then nothing is caught, and Stop stays silent.
    """
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
