"""The pipe from a training or a sweep to the uploader, a JSON list per line: follow a run, a run is gone, bye."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

#: while the training runs, the uploader works a tenth of the time: on two cores it slows the training loop
RESTS_PER_WORK = 9
#: a sweep's jobs keep the machine busy anyway, and would wait for the rest of the points at the end
RESTS_IN_A_SWEEP = 0
LONGEST_REST_SECONDS = 2.0  # also after a slow call

FOLLOW, GONE, BYE = "follow", "gone", "bye"


def line_of(*words: object) -> bytes:
    """Return a line: `["follow", "/runs/0"]`, `["gone", "/runs/0"]`, or `["bye", grace_seconds or null]`."""
    return json.dumps(words).encode() + b"\n"


class Line:
    """The uploader's end of the pipe, read by a thread, so that the pipe never fills.

    "bye" or the end of the pipe is the end of the training or the sweep.
    """

    def __init__(self, pipe: BinaryIO, *, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.closed_at: float | None = None  # of time.monotonic(); None while the training runs
        self._rests_per_work = RESTS_PER_WORK
        self._runs: queue.SimpleQueue[tuple[str, Path]] = queue.SimpleQueue()
        self._news, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._read, args=(pipe,), name="runner-line", daemon=True).start()

    def runs(self) -> Iterator[tuple[str, Path]]:
        """Yield what was said since the last call: FOLLOW or GONE, and the run directory."""
        while not self._runs.empty():
            yield self._runs.get()

    def wait(self, seconds: float) -> None:
        """Wait until a line or notify() comes, at most `seconds`."""
        self._news.wait(seconds)
        self._news.clear()

    def notify(self) -> None:
        """End a wait(). Any thread may call it."""
        self._news.set()

    def rest(self, worked_seconds: float) -> None:
        """Leave the machine to the training for a multiple of the working time; return at once when it is over."""
        self._closed.wait(min(self._rests_per_work * worked_seconds, LONGEST_REST_SECONDS))

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function in another thread, `seconds` after the end of the training or the sweep."""

        def wait() -> None:
            self._closed.wait()
            time.sleep(seconds)
            call()

        threading.Thread(target=wait, name="runner-later", daemon=True).start()

    def _read(self, pipe: BinaryIO) -> None:
        for line in pipe:
            if not line.endswith(b"\n"):  # its writer was killed
                break
            kind, value = json.loads(line)
            if kind == BYE:
                self.grace_seconds = self.grace_seconds if value is None else value
                break
            self._rests_per_work = RESTS_IN_A_SWEEP
            self._runs.put((kind, Path(value)))
            self._news.set()
        self.closed_at = time.monotonic()
        self._closed.set()
        self._news.set()
