"""Work that may wait (for the device, the disk) goes in; it is done in order, beside training, by one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Background:
    """One thread that runs what it is given, in order. What fails there is raised here, at the next call or at close.

    After a failure of one job the later jobs still run: a metric that is not finite must not keep a checkpoint away.
    """

    def __init__(self, *, most_waiting: int = 8) -> None:
        # bounded: when the disk can't follow, training waits here instead of filling the memory
        self._jobs: queue.Queue[Callable[[], Any] | None] = queue.Queue(most_waiting)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="runner-background", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], Any]) -> None:
        """Hands over a job and returns; waits only while `most_waiting` jobs are ahead. Raises what an earlier job raised."""
        self._jobs.put(job)
        self.raise_error()

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
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # handed to the thread that trains
                self._error = self._error or error
            finally:
                del job  # a finished job keeps no tensors alive while the thread waits for the next
                self._jobs.task_done()
        self._jobs.task_done()
