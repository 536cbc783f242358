"""The pipe from a training or a sweep to the uploader: follow a run, a run is gone, bye."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

#: while the training runs, the uploader works a tenth of the time: on two cores it slows the training loop
RESTS_PER_WORK = 9
#: a sweep's jobs keep the machine busy anyway, and would wait for the rest of the points at the end
RESTS_IN_A_SWEEP = 0
LONGEST_REST_SECONDS = 2.0  # also after a slow call

NEWS = b"\n"
FOLLOW, GONE = "follow", "gone"

log = logging.getLogger("runner.tracking")


def word(kind: str, folder: Path) -> bytes:
    """Return `follow "/runs/0"` or `gone "/runs/0"` as a line of bytes; JSON keeps every path in one line."""
    return f"{kind} {json.dumps(str(folder))}\n".encode()


def bye(grace_seconds: float | None) -> bytes:
    """Return the last line. grace_seconds: None: the value at the start of the process."""
    return b"bye\n" if grace_seconds is None else b"bye %r\n" % grace_seconds


class Line:
    """The uploader's end of the pipe, read by a thread, so that the pipe never fills.

    An empty line says that a journal has grown. "bye", with or without the grace seconds, or the end of the pipe is the
    end of the training or the sweep.
    """

    def __init__(self, fd: int, *, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.closed_at: float | None = None  # of time.monotonic(); None while the training runs
        self._rests_per_work = RESTS_PER_WORK
        self._words: queue.SimpleQueue[tuple[str, Path]] = queue.SimpleQueue()
        self._news, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._read, args=(fd,), name="runner-line", daemon=True).start()

    def words(self) -> Iterator[tuple[str, Path]]:
        """Yield the lines since the last call: (FOLLOW or GONE, the run directory)."""
        while not self._words.empty():
            yield self._words.get()

    def wait(self, seconds: float) -> None:
        """Wait until a journal has grown, or for so many seconds."""
        self._news.wait(seconds)
        self._news.clear()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the training is over, or for so many seconds; at most one second after the end."""
        if self._closed.is_set():
            time.sleep(min(seconds, 1.0, self.grace_seconds / 4))
        else:
            self._closed.wait(seconds)

    def rest(self, worked_seconds: float) -> None:
        """Leave the machine to the training for a multiple of the working time; return at once when it is over."""
        self._closed.wait(min(self._rests_per_work * worked_seconds, LONGEST_REST_SECONDS))

    def _read(self, fd: int) -> None:
        last = b""
        while chunk := _read_some(fd):
            *whole, last = (last + chunk).split(b"\n")
            for line in filter(None, whole):
                try:
                    self._hear(line)
                except ValueError:
                    log.exception("unknown line: %r", line)
            self._news.set()
        self._close()

    def _hear(self, line: bytes) -> None:
        kind, _, rest = line.decode().partition(" ")
        if kind == "bye":
            self.grace_seconds = float(rest or self.grace_seconds)
            self._close()
        elif kind in (FOLLOW, GONE):
            self._rests_per_work = RESTS_IN_A_SWEEP
            self._words.put((kind, Path(json.loads(rest))))
        else:
            raise ValueError(f"unknown command {kind}")

    def _close(self) -> None:
        if self.closed_at is None:
            self.closed_at = time.monotonic()
            self._closed.set()
            self._news.set()


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""
