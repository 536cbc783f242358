"""Runs in one thread beside a training, in order, what waits for the device or the disk: windows of metrics, checkpoints.

It keeps the jobs that wait, and an error of one until the next call, which raises it. Each training has one (fit.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

#: seconds after which what the jobs leave behind is settled, though more of them wait
MOST_SECONDS = 1.0


def _nothing() -> None:
    pass


class Background:
    """One thread that runs what it is given, in order. What fails there is raised here, at the next call or at close.

    After a failure of one job the later jobs still run, but for those that build on all before them (do_settled): no
    checkpoint is written of weights after a loss that is not finite, or ahead of points that the journal has not got.

    begin: runs first, in the thread.
    settle: runs after a job when no other waits, each second where others always do, and before wait() and close() are
        over. Jobs that leave their part of the disk's work to it wait for a slow disk together: with 0.3 s for each
        window's own, a training of 1,400 steps a second had 333 (2026-11).
    """

    def __init__(
        self, settle: Callable[[], None] = _nothing, *, begin: Callable[[], None] = _nothing, most_waiting: int = 1000
    ) -> None:
        # bounded: when the disk can't follow at all, training waits here instead of filling the memory
        self._jobs: queue.Queue[Callable[[], Any] | None] = queue.Queue(most_waiting)
        self._settle, self._begin = settle, begin
        self._error: BaseException | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="runner-background", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], Any]) -> None:
        """Hands over a job and returns; waits only while `most_waiting` jobs are ahead. Raises what an earlier job raised."""
        self.put(job)
        self.raise_error()

    def put(self, job: Callable[[], Any]) -> None:
        """Like do(), for a thread that what an earlier job raised is not to be told to."""
        self._jobs.put(job)

    def do_settled(self, job: Callable[[], Any]) -> None:
        """Like do(), with settle() right before the job, which is left out where that, or any job before, has failed."""

        def both() -> None:
            self._settle()
            if not self._has_failed:
                job()

        self.do(both)

    def wait(self) -> None:
        """Returns when everything handed over is done. Raises what a job raised."""
        self._jobs.join()
        self.raise_error()

    def close(self) -> None:
        """Finishes what was handed over and ends the thread. Raises what a job raised and nobody has seen yet."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        self._try(self._begin)
        settled = time.monotonic()
        while (job := self._jobs.get()) is not None:
            self._try(job)
            del job  # a finished job keeps no tensors alive while the thread waits for the next
            if self._jobs.empty() or time.monotonic() - settled > MOST_SECONDS:
                self._try(self._settle)
                settled = time.monotonic()
            self._jobs.task_done()
        self._try(self._settle)
        self._jobs.task_done()

    def _try(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:  # handed to the thread that trains
            self._error, self._has_failed = self._error or error, True
