"""The line between a training or a sweep and the publishing process: follow this run, that one is gone, goodbye.

The publishing process's end is read by a thread of its own, and remembers when the line closed and how much grace there is.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

#: while the training lives the publishing takes a tenth of the time: two cores are often one, and a busy neighbour slowed a
#: loop of 3,000 steps a second to 2,500 (2026-11). 1,000 points a second still go out as they come, the rest at the end
RESTS_PER_WORK = 9
#: in a sweep as it needs: its jobs fill the machine anyway, and what is left over keeps the whole sweep waiting at its end, on one
#: core: with as long a rest as its work 64 digits MLPs took 20.5 s for 18.4, 32 of the spiral 22.6 for 20.6 (means of 3, in turns)
RESTS_IN_A_SWEEP = 0
LONGEST_REST_SECONDS = 2.0  # one slow call must not silence it for long

NEWS = b"\n"
FOLLOW, GONE = "follow", "gone"

log = logging.getLogger("runner.tracking")


def word(kind: str, folder: Path) -> bytes:
    """`follow "/runs/0"` or `gone "/runs/0"`, as a line of bytes; JSON keeps every path in one line."""
    return f"{kind} {json.dumps(str(folder))}\n".encode()


def bye(grace_seconds: float | None) -> bytes:
    """The last word. grace_seconds: None: what the process was started with."""
    return b"bye\n" if grace_seconds is None else b"bye %r\n" % grace_seconds


class Line:
    """The publishing process's end of the line, read by a thread of its own: the pipe never fills.

    A newline is news; "follow" and "gone" are for words(); "bye", with the grace seconds or without, or the end of the
    line is the end of the training or of the whole sweep.
    """

    def __init__(self, fd: int, *, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.closed_at: float | None = None  # of time.monotonic(); None while the training lives
        self._rests_per_work = RESTS_PER_WORK
        self._words: queue.SimpleQueue[tuple[str, Path]] = queue.SimpleQueue()
        self._news, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._read, args=(fd,), name="runner-line", daemon=True).start()

    def words(self) -> Iterator[tuple[str, Path]]:
        """What came since the last call, in order: (FOLLOW or GONE, the run's folder)."""
        while not self._words.empty():
            yield self._words.get()

    def wait(self, seconds: float) -> None:
        """Returns when there is news, or the time is over."""
        self._news.wait(seconds)
        self._news.clear()

    def wait_for_end(self, seconds: float) -> None:
        """Returns when the training is over, or the time is; at the end it pauses a second at the most."""
        if self._closed.is_set():
            time.sleep(min(seconds, 1.0, self.grace_seconds / 4))
        else:
            self._closed.wait(seconds)

    def rest(self, worked_seconds: float) -> None:
        """Leaves the machine to the training, for some times as long as was worked; returns at once when that is over."""
        self._closed.wait(min(self._rests_per_work * worked_seconds, LONGEST_REST_SECONDS))

    def _read(self, fd: int) -> None:
        last = b""
        while chunk := _read_some(fd):
            *whole, last = (last + chunk).split(b"\n")
            for line in filter(None, whole):
                try:
                    self._hear(line)
                except ValueError:
                    log.exception("a word that makes no sense: %r", line)
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
            raise ValueError(f"{kind} is no word of this line")

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
