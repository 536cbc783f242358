"""The loop of the uploader process: which run sends next, several at a time.

A run that has ended is sent completely before the next one; then running ones take turns; files of ended runs come last.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from runner.tracking.pipe import FOLLOW, Line
from runner.tracking.publisher import NOT_DELIVERED
from runner.tracking.sync import LOOK_SECONDS, Backoff, FollowedRun, Turn

BROKEN = 1  # exit code after an unexpected error
ORPHAN_SECONDS = 120.0  # to send the rest when the training or the sweep was killed

log = logging.getLogger("runner.tracking")


class UploadLoop:
    """The followed runs, and the state of their store.

    A failing run pauses, and the others continue. If the store does not answer, all runs wait while one small request is
    repeated: an attempt of each of a hundred runs would wait for a hundred time-outs.

    Args:
        folder: The first run's; a sweep's is the parent of the others.
        run_of: Makes a run from its directory.
        ask: Returns why the store does not answer, or None.
    """

    def __init__(
        self,
        folder: Path,
        line: Line,
        *,
        run_of: Callable[[Path], FollowedRun],
        ask: Callable[[], str | None],
        num_at_once: int = 1,
    ) -> None:
        self._line, self._run_of, self._ask, self._num_at_once = line, run_of, ask, num_at_once
        self._first = run_of(folder)
        self._runs = {folder: self._first}
        self._busy: dict[Future[Turn], FollowedRun] = {}
        self._pool = ThreadPoolExecutor(num_at_once, thread_name_prefix="runner-send")
        self._backoff = Backoff()
        self._broken: set[Path] = set()  # the runs whose last turn ended with an unexpected error
        self._outage: str | None = None  # why the store does not answer
        self._ask_at = 0.0  # during an outage

    def run(self, *, has_owner: Callable[[], bool] = lambda: True) -> int:
        """Send the journals as they grow, until everything has ended and is sent.

        Args:
            has_owner: Returns whether the training or the sweep is alive; then the rest gets ORPHAN_SECONDS.

        Returns:
            0, or 3 if something is left.
        """
        has_ended, until = False, math.inf
        while True:
            if until == math.inf and not has_owner():
                until = time.monotonic() + ORPHAN_SECONDS
            if time.monotonic() > until and self._runs:
                log.warning("the training or the sweep was killed: `python -m runner sync` sends the rest")
                return self._give_up()
            closed_at = self._line.closed_at  # read before sending, so that nothing written before the end is missed
            self._hear()
            if closed_at is not None and not has_ended:
                has_ended, self._outage = True, None
                for run in self._runs.values():
                    run.end()
                    run.due_at, run.has_waited = time.monotonic(), False  # a last attempt each
            self._take_results()
            is_late = closed_at is not None and self._is_late(closed_at)
            self._start_turns(is_late=is_late)
            if is_late and not self._busy:
                return self._give_up()
            for run in self._runs.values():
                run.sample()
            self._line.wait(self._seconds_to_wait())

    def _hear(self) -> None:
        for kind, folder in self._line.runs():
            if kind == FOLLOW:  # a resumed run is followed again
                run = self._runs.setdefault(folder, self._run_of(folder))
                run.is_gone, run.due_at = False, time.monotonic()
            elif folder in self._runs:
                self._runs[folder].end()

    def _start_turns(self, *, is_late: bool) -> None:
        if self._outage is not None and (time.monotonic() < self._ask_at or not self._is_answering()):
            return
        while len(self._busy) < self._limit() and (due := self._due(is_late=is_late)):
            run = self._first if self._first in due and not self._first.has_begun else min(due, key=_priority)
            future = self._pool.submit(run.turn)
            self._busy[future] = run
            future.add_done_callback(lambda _: self._line.notify())

    def _limit(self) -> int:
        # the first run creates the experiment, and is the parent of a sweep's jobs
        return self._num_at_once if self._first.has_begun else 1

    def _due(self, *, is_late: bool) -> list[FollowedRun]:
        """Return the runs whose turn it is; after the grace time only those that had no attempt since the end."""
        now, busy = time.monotonic(), set(self._busy.values())
        idle = [run for run in self._runs.values() if run.due_at <= now and run not in busy]
        return [run for run in idle if not (is_late and run.has_waited)]

    def _take_results(self) -> None:
        for future in [future for future in self._busy if future.done()]:
            run, result = self._busy.pop(future), future.result()
            if run.failure is not None and run.folder not in self._broken:  # logged once
                log.error("%s: unexpected error", run.folder, exc_info=run.failure)
            (self._broken.discard if run.failure is None else self._broken.add)(run.folder)
            if run.has_worked:
                self._backoff.reset()
            if result is Turn.DONE and run.is_gone:  # else it was resumed
                self._runs.pop(run.folder).release()
            elif result is Turn.FAILED and len(self._runs) > 1 and (self._outage or not self._is_answering()):
                pass  # its turn stays due; for a single run, its attempts are the requests
            else:
                run.schedule(result, longest_seconds=self._longest_pause())

    def _is_answering(self) -> bool:
        """Ask the store, and note an outage in each run's ack.json."""
        self._outage = self._ask()
        if self._outage is not None:
            self._ask_at = time.monotonic() + min(self._longest_pause(), self._backoff.pause_seconds())
            for run in self._runs.values():
                if run not in self._busy.values():
                    run.note_outage(self._outage)
        return self._outage is None

    def _seconds_to_wait(self) -> float:
        if len(self._busy) >= self._limit():
            return LOOK_SECONDS  # a turn that ends notifies the line
        idle = [run.due_at for run in self._runs.values() if run not in self._busy.values()]
        at = self._ask_at if self._outage is not None else min(idle, default=math.inf)
        return min(LOOK_SECONDS, self._longest_pause(), max(0.0, at - time.monotonic()))

    def _longest_pause(self) -> float:
        """Seconds; after the end, some attempts are made during the grace time."""
        return math.inf if self._line.closed_at is None else min(1.0, max(0.02, self._line.grace_seconds / 4))

    def _is_late(self, closed_at: float) -> bool:
        """Return whether nothing is left, or nothing was sent during the grace time."""
        if not self._runs:
            return True
        if self._outage is None and any(run.waits_for_predecessor for run in self._runs.values()):
            return False
        return self._backoff.silent_seconds(since=closed_at) > self._line.grace_seconds

    def _give_up(self) -> int:
        """Release all runs after the current calls, and return the exit code."""
        wait(self._busy)
        self._take_results()
        left = [run for run in self._runs.values() if not run.is_complete()]
        for run in left:
            run.report_left()
        is_broken = any(run.failure is not None for run in left)
        for run in self._runs.values():
            run.release()
        self._runs.clear()
        self._pool.shutdown()
        return BROKEN if is_broken else NOT_DELIVERED if left else 0


def _priority(run: FollowedRun) -> tuple[int, float]:
    rank = 1 if not run.is_gone else 2 if run.has_only_files else 0
    return rank, run.due_at
