"""Runs what waits for the device or the disk in a second thread, in order: windows of metrics, checkpoints.

An error of a job is raised by the next call. Each training has one Background (fit.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

#: seconds after which settle() is called, although more jobs wait
MAX_SECONDS = 1.0
MAX_WAITING = 1000


class Background:
    """One thread that runs jobs in order.

    After an error later jobs still run, except those of do_settled(): no checkpoint is written after a loss that is not
    finite, or before its points are in the journal.

    Args:
        settle: Called after a job when no other waits, every second if others always wait, and before wait() and close()
            return. It syncs the disk once for many jobs.
        begin: Called first, in the thread.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None, *, begin: Callable[[], None] = lambda: None) -> None:
        # bounded: with a disk that is too slow, training waits instead of filling the memory
        self._jobs: queue.Queue[Callable[[], Any] | None] = queue.Queue(MAX_WAITING)
        self._settle, self._begin = settle, begin
        self._error: BaseException | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="runner-background", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], Any]) -> None:
        """Queue a job; waits only if MAX_WAITING jobs are queued. Raises errors of earlier jobs."""
        self.put(job)
        self.raise_error()

    def put(self, job: Callable[[], Any]) -> None:
        """Like do(), without raising."""
        self._jobs.put(job)

    def do_settled(self, job: Callable[[], Any]) -> None:
        """Like do(), with settle() right before the job, which is skipped if settle() or an earlier job failed."""

        def both() -> None:
            self._settle()
            if not self._has_failed:
                job()

        self.do(both)

    def wait(self) -> None:
        """Return when all jobs are done. Raises their errors."""
        self._jobs.join()
        self.raise_error()

    def close(self) -> None:
        """Finish the jobs and end the thread. Raises errors that were not raised yet."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self.raise_error()

    def recover(self) -> None:
        """Continue after an error that was raised and repaired."""
        self._has_failed = False

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
            if self._jobs.empty() or time.monotonic() - settled > MAX_SECONDS:
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
