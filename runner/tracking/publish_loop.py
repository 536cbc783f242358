"""The loop of the publishing process: which of the runs that it follows sends next, several at a time.

A run whose process is over is sent completely before the next one, then those that are running take turns, then come the
files of the finished ones. It keeps the runs and since when the store has not answered.
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

LOOK_SECONDS = 0.5  # it looks without a wake, too: not every point comes with one
BUSY_SECONDS = 0.05  # from one look at the line to the next while turns are being taken
BROKEN = 1  # the exit code for an unexpected error
ORPHAN_SECONDS = 120.0  # for what is left once the training or the sweep is gone

log = logging.getLogger("runner.tracking")


class Rounds:
    """The runs that are followed, and what is known of their store.

    A run that fails by itself pauses by itself. When the store does not answer, all wait, and one small question is
    asked again and again: an attempt for each of a hundred runs would wait for a hundred timeouts.

    run_of: makes a run of its folder.
    ask: what keeps the store from answering, or None.
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
        self.outage: str | None = None  # what keeps the store from answering
        self._waiting = deque[PublishedRun]()  # for their turns
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
        """One of the line's words. A run that goes on after it was gone is followed again."""
        if kind == FOLLOW:
            if folder not in self.runs:
                self.runs[folder] = self._run_of(folder)
            self.runs[folder].is_gone = False
        elif folder in self.runs:
            self.runs[folder].end()

    def end_all(self) -> None:
        """Everything is over: each run gets a turn from now on, whatever went before."""
        while self._busy:
            self.take_results(None)
        for run in self.runs.values():
            run.end()
        self.outage = None
        self._waiting = deque(self.runs.values())

    def begin(self) -> None:
        """Everyone who does not pause gets a turn."""
        self._looked_at = time.monotonic()
        taken = {*self._waiting, *self._busy.values()}
        self._waiting.extend(run for run in self.runs.values() if not run.is_pausing and run not in taken)

    def turn(self) -> None:
        """The next run sends one thing; returns when there is room for another one to do so."""
        run = min(self._waiting, key=_rank)  # of equals the first
        self._waiting.remove(run)
        if self._pool is None:
            self._take(run, run.turn())
            return
        self._busy[self._pool.submit(run.turn)] = run
        # the first run's record makes the experiment, and a sweep's jobs are linked to it
        num_at_once = self._num_at_once if self._first.has_begun else 1
        while len(self._busy) >= num_at_once:
            self.take_results(None)

    def take_results(self, seconds: float | None) -> bool:
        """Waits for a turn to end, if any is being taken. Returns whether that is so."""
        if not self._busy:
            return False
        for future in wait(self._busy, seconds, FIRST_COMPLETED).done:
            self._take(self._busy.pop(future), future.result())
        return True

    def _take(self, run: PublishedRun, went: Went) -> None:
        if run.has_worked:
            self.patience.worked()
        if went is Went.OVER and run.is_gone:  # else it is running again
            self.runs.pop(run.folder).let_go()
        elif went is Went.MORE and run.is_gone:
            self._waiting.appendleft(run)
        elif went is Went.MORE:
            self._waiting.append(run)
        elif went is Went.FAILED and len(self.runs) > 1 and (self.outage is not None or not self.is_answered()):
            self._waiting.appendleft(run)  # a single run's attempt asks, too
        elif went in (Went.FAILED, Went.LOCKED):
            run.pause()

    def is_answered(self) -> bool:
        """Asks the store; what keeps it from answering is noted with each run."""
        self.outage = self._ask()
        if self.outage is not None:
            for run in self.runs.values():
                if run not in self._busy.values():
                    run.note_outage(self.outage)
        return self.outage is None

    def wait(self, line: Line) -> None:
        """Until there is news, or it is time to look; wakes do not hurry runs that pause."""
        pauses = {run.pause_seconds: run for run in self.runs.values()}
        if pauses and all(pauses):
            shortest = min(pauses)
            line.wait_for_end(shortest)
            pauses[shortest].pause(0.0)
        else:
            line.wait(min([LOOK_SECONDS, *filter(None, pauses)]))

    def is_late(self, closed_at: float, *, grace_seconds: float) -> bool:
        """Whether nothing is left, or nothing has got through for so long that nothing is going to."""
        if not self.runs:
            return True
        if self.outage is None and any(run.waits_for_predecessor for run in self.runs.values()):
            return False
        return self.patience.silent_seconds(since=closed_at) > grace_seconds

    def sample(self) -> None:
        for run in self.runs.values():
            run.sample()

    def give_up(self) -> int:
        """Let all go, after the calls that are under way. Returns: the exit code."""
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


def follow(rounds: Rounds, line: Line, *, has_owner: Callable[[], bool] = lambda: True) -> int:
    """Send the journals as they grow, until all is over and sent.

    Args:
        has_owner: whether the process that this one works for is alive; once it is not, what is left gets ORPHAN_SECONDS.

    Returns:
        0, or 3 when something is left.
    """
    is_over, until = False, math.inf
    while True:
        if until == math.inf and not has_owner():
            until = time.monotonic() + ORPHAN_SECONDS
        if time.monotonic() > until and rounds.runs:
            log.warning("the process that this one works for is gone: `python -m runner sync` sends the rest")
            return rounds.give_up()
        closed_at = line.closed_at  # looked at before sending: nothing that was written before the end is missed
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
