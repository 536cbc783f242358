"""The loop of the uploader process: which run sends next, several at a time.

A run that has ended is sent completely before the next one; then running ones take turns; files of ended runs come last.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from runner.tracking.backoff import Backoff
from runner.tracking.pipe import FOLLOW, Line
from runner.tracking.publish_run import PublishedRun, Went
from runner.tracking.publisher import NOT_DELIVERED

LOOK_SECONDS = 0.5  # between two looks at the journals without a wake-up
BUSY_SECONDS = 0.05  # between two looks at the pipe during turns
BROKEN = 1  # exit code after an unexpected error
ORPHAN_SECONDS = 120.0  # to send the rest when the training or the sweep was killed

log = logging.getLogger("runner.tracking")


class UploadRounds:
    """The followed runs, and the state of their store.

    A failing run pauses, and the others continue. If the store does not answer, all runs wait while one small request is
    repeated: an attempt of each of a hundred runs would wait for a hundred time-outs.

    Args:
        run_of: Makes a run from its directory.
        ask: Returns why the store does not answer, or None.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_of: Callable[[Path], PublishedRun],
        ask: Callable[[], str | None],
        num_at_once: int = 1,
    ) -> None:
        self._run_of, self._ask, self._num_at_once = run_of, ask, num_at_once
        self._first = run_of(folder)
        self.runs = {folder: self._first}
        self.patience = Backoff()
        self.outage: str | None = None  # why the store does not answer
        self._waiting = deque[PublishedRun]()  # for a turn
        self._busy: dict[Future[Went], PublishedRun] = {}
        self._pool = ThreadPoolExecutor(num_at_once, thread_name_prefix="runner-send") if num_at_once > 1 else None
        self._looked_at = -math.inf  # of time.monotonic()

    @property
    def has_turns(self) -> bool:
        return bool(self._waiting)

    @property
    def is_time_to_look(self) -> bool:
        return time.monotonic() - self._looked_at > LOOK_SECONDS

    def hear(self, kind: str, folder: Path) -> None:
        """Handle a line of the pipe. A resumed run is followed again."""
        if kind == FOLLOW:
            if folder not in self.runs:
                self.runs[folder] = self._run_of(folder)
            self.runs[folder].is_gone = False
        elif folder in self.runs:
            self.runs[folder].end()

    def end_all(self) -> None:
        """Give every run a turn, as the training or the sweep has ended."""
        while self._busy:
            self.take_results(None)
        for run in self.runs.values():
            run.end()
        self.outage = None
        self._waiting = deque(self.runs.values())

    def begin(self) -> None:
        """Give every run that does not pause a turn."""
        self._looked_at = time.monotonic()
        taken = {*self._waiting, *self._busy.values()}
        self._waiting.extend(run for run in self.runs.values() if not run.is_pausing and run not in taken)

    def turn(self) -> None:
        """Start the turn of the next run; return when another one can start."""
        run = min(self._waiting, key=_rank)  # the first of equals
        self._waiting.remove(run)
        if self._pool is None:
            self._take(run, run.turn())
            return
        self._busy[self._pool.submit(run.turn)] = run
        # the first run creates the experiment, and is the parent of a sweep's jobs
        num_at_once = self._num_at_once if self._first.has_begun else 1
        while len(self._busy) >= num_at_once:
            self.take_results(None)

    def take_results(self, seconds: float | None) -> bool:
        """Wait for a turn to end. Returns whether any turn was running."""
        if not self._busy:
            return False
        for future in wait(self._busy, seconds, FIRST_COMPLETED).done:
            self._take(self._busy.pop(future), future.result())
        return True

    def _take(self, run: PublishedRun, went: Went) -> None:
        if run.has_worked:
            self.patience.worked()
        if went is Went.OVER and run.is_gone:  # else it was resumed
            self.runs.pop(run.folder).let_go()
        elif went is Went.MORE and run.is_gone:
            self._waiting.appendleft(run)
        elif went is Went.MORE:
            self._waiting.append(run)
        elif went is Went.FAILED and len(self.runs) > 1 and (self.outage is not None or not self.is_answered()):
            self._waiting.appendleft(run)  # for a single run, its attempts are the requests
        elif went in (Went.FAILED, Went.LOCKED):
            run.pause()

    def is_answered(self) -> bool:
        """Ask the store, and note an outage in each run's ack.json."""
        self.outage = self._ask()
        if self.outage is not None:
            for run in self.runs.values():
                if run not in self._busy.values():
                    run.note_outage(self.outage)
        return self.outage is None

    def wait(self, line: Line) -> None:
        """Wait for news or the next look; news don't shorten a pause of all runs."""
        pauses = {run.pause_seconds: run for run in self.runs.values()}
        if pauses and all(pauses):
            shortest = min(pauses)
            line.wait_for_end(shortest)
            pauses[shortest].pause(0.0)
        else:
            line.wait(min([LOOK_SECONDS, *filter(None, pauses)]))

    def is_late(self, closed_at: float, *, grace_seconds: float) -> bool:
        """Return whether nothing is left, or nothing was sent during the grace time."""
        if not self.runs:
            return True
        if self.outage is None and any(run.waits_for_predecessor for run in self.runs.values()):
            return False
        return self.patience.silent_seconds(since=closed_at) > grace_seconds

    def sample(self) -> None:
        for run in self.runs.values():
            run.sample()

    def give_up(self) -> int:
        """Release all runs after the current calls, and return the exit code."""
        while self._busy:
            self.take_results(None)
        left = [run for run in self.runs.values() if not run.is_complete()]
        for run in left:
            run.say_what_is_left()
        is_broken = any(run.is_broken for run in left)
        for run in self.runs.values():
            run.let_go()
        self.runs.clear()
        if self._pool is not None:
            self._pool.shutdown()
        return BROKEN if is_broken else NOT_DELIVERED if left else 0


def follow(rounds: UploadRounds, line: Line, *, has_owner: Callable[[], bool] = lambda: True) -> int:
    """Send the journals as they grow, until everything has ended and is sent.

    Args:
        has_owner: Returns whether the training or the sweep is alive; then the rest gets ORPHAN_SECONDS.

    Returns:
        0, or 3 if something is left.
    """
    is_over, until = False, math.inf
    while True:
        if until == math.inf and not has_owner():
            until = time.monotonic() + ORPHAN_SECONDS
        if time.monotonic() > until and rounds.runs:
            log.warning("the training or the sweep was killed: `python -m runner sync` sends the rest")
            return rounds.give_up()
        closed_at = line.closed_at  # read before sending, so that nothing written before the end is missed
        for kind, folder in line.words():
            rounds.hear(kind, folder)
        if closed_at is not None and not is_over:
            is_over = True
            rounds.end_all()
        if rounds.outage is None and rounds.is_time_to_look:
            rounds.begin()
        if rounds.outage is None and rounds.has_turns:
            rounds.turn()
        elif rounds.take_results(BUSY_SECONDS):
            pass
        elif closed_at is not None and rounds.is_late(closed_at, grace_seconds=line.grace_seconds):
            return rounds.give_up()
        elif rounds.outage is not None:
            line.wait_for_end(rounds.patience.pause_seconds())
            rounds.is_answered()
        else:
            rounds.wait(line)
            rounds.begin()
        rounds.sample()


def _rank(run: PublishedRun) -> int:
    return 1 if not run.is_gone else 2 if run.has_only_files else 0
