"""A run's folder goes in; its page in MLflow comes out: `python -m runner.publish FOLDER`, beside the training."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from runner.tracking import place, store
from runner.tracking.patience import Patience
from runner.tracking.publisher import GRACE, NOT_DELIVERED
from runner.tracking.sync import LOCK
from runner.tracking.uploader import Uploader

LOOK_SECONDS = 0.5  # it looks by itself, too: not every point comes with a wake
POSTPONED_SECONDS = 30.0
#: while the training lives this process works a tenth of the time: two cores are often one, and a busy neighbour slowed a
#: loop of 3,000 steps a second to 2,500 (2026-11). 1,000 points a second still go out as they come, the rest at the end
RESTS_PER_WORK = 9
LONGEST_REST_SECONDS = 2.0  # one slow call must not silence it for long
WARM_UP_AFTER_SECONDS = 30.0  # it takes 4 s of a core: worth it beside a long training, not beside a short one
PREDECESSOR_SECONDS = 30.0  # the process of an interrupted run may still be at its end when the run goes on

log = logging.getLogger("runner.publish")


class Line:
    """The training's end of the line, read by a thread of its own: the pipe never fills.

    A newline is news; "bye", with the grace seconds or without, or the end of the line is the end of the training.
    """

    def __init__(self, fd: int, *, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.closed_at: float | None = None  # of time.monotonic(); None while the training lives
        self._news, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._read, args=(fd,), name="runner-line", daemon=True).start()

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
        self._closed.wait(min(RESTS_PER_WORK * worked_seconds, LONGEST_REST_SECONDS))

    def _read(self, fd: int) -> None:
        last = b""
        while chunk := _read_some(fd):
            *whole, last = (last + chunk).split(b"\n")
            for word in whole:
                if word.startswith(b"bye"):
                    self.grace_seconds = float(word[3:] or self.grace_seconds)
                    self._close()
            self._news.set()
        self._close()

    def _close(self) -> None:
        if self.closed_at is None:
            self.closed_at = time.monotonic()
            self._closed.set()
            self._news.set()


def follow(uploader: Uploader, line: Line, *, warm_up: Callable[[], None]) -> int:
    """Sends the journal as it grows, until the training is over and all of it is sent. Returns 0, or 3 with a rest."""
    patience = Patience()
    warm_at = time.monotonic() + WARM_UP_AFTER_SECONDS
    postponed_at = time.monotonic() + POSTPONED_SECONDS
    while True:
        closed_at = line.closed_at  # looked at before sending: nothing that was written before the end is missed
        before = uploader.ack.offset
        postponed = closed_at is not None or time.monotonic() > postponed_at
        if postponed:
            postponed_at = time.monotonic() + POSTPONED_SECONDS
        sent = not uploader.has_run() or uploader.attempt(postponed=postponed)
        if sent or uploader.ack.offset > before:
            patience.worked()
        if closed_at is not None:
            if sent and uploader.abandon():
                return 0
            if patience.silent_seconds(since=closed_at) > line.grace_seconds:
                return NOT_DELIVERED
        if not sent:
            line.wait_for_end(patience.pause_seconds())
        elif uploader.wants_model and time.monotonic() > warm_at:
            warm_at = math.inf
            warm_up()
        else:
            line.wait(LOOK_SECONDS)
            uploader.sample()


def main(argv: list[str]) -> int:
    """The process. Returns 0, 3 when something is left in the journal, 1 for what should not happen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    folder, uri = Path(argv[0]), os.environ["MLFLOW_TRACKING_URI"]
    line = Line(sys.stdin.fileno(), grace_seconds=float(os.environ.get(GRACE, "10")))
    os.environ.update(store.SETTINGS)
    if hasattr(os, "nice"):
        os.nice(5)  # the training comes first
    _write_masked(uri)
    _open_sqlite(uri)

    try:
        with FileLock(folder / LOCK, timeout=PREDECESSOR_SECONDS, thread_local=False):
            return follow(Uploader(folder, uri, live=True, rest=line.rest), line, warm_up=_warm_up)
    except Timeout:
        log.error("another process is sending this run: nothing was sent from here")
        return NOT_DELIVERED
    except Exception:
        log.exception("this should not happen")
        return 1


def _open_sqlite(uri: str) -> None:
    """Imports MLflow and makes the store where there is none: 2 s each, while the training is still reading its data."""
    import mlflow  # noqa: F401

    if place.sqlite_path(uri):
        ended = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing may leave a store half made
        try:
            store.open_store(uri)
        except Exception as error:  # it is told when there is something to send
            log.warning("the store does not open: %s", store.explain(error, uri=uri))
        finally:
            signal.signal(signal.SIGTERM, ended)


def _warm_up() -> None:
    from runner.tracking.logged_model import warm_up

    try:
        warm_up()
    except Exception:
        log.exception("the warm-up for the model failed; the model will say what is wrong")


def _write_masked(uri: str) -> None:
    """Whatever is written from here on, by MLflow too, goes to the log without the password."""
    mask = place.masker(uri)
    sys.stdout, sys.stderr = _Masked(sys.stdout, mask), _Masked(sys.stderr, mask)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)


class _Masked:
    def __init__(self, stream: TextIO, mask: Callable[[str], str]) -> None:
        self._stream, self._mask = stream, mask

    def write(self, text: str) -> int:
        return self._stream.write(self._mask(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
