"""The loop of the publishing process: in each round every run that it follows has one turn to send.

It keeps the runs, whose turn is next, and since when the store has not answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from runner.tracking.backoff import Backoff
from runner.tracking.pipe import FOLLOW, Line
from runner.tracking.publish_run import PublishedRun, Went
from runner.tracking.publisher import NOT_DELIVERED

LOOK_SECONDS = 0.5  # it looks by itself, too: not every point comes with a wake
BROKEN = 1  # the exit code for what should not happen


class Rounds:
    """The runs that are followed, and what is known of their store.

    A run that fails by itself pauses by itself. When the store does not answer, all wait, and one small question is
    asked again and again: an attempt for each of a hundred runs would wait for a hundred timeouts.

    run_of: makes a run of its folder.
    ask: what keeps the store from answering, or None.
    """

    def __init__(self, folder: Path, *, run_of: Callable[[Path], PublishedRun], ask: Callable[[], str | None]) -> None:
        self._run_of, self._ask = run_of, ask
        self.runs = {folder: run_of(folder)}
        self.patience = Backoff()
        self.outage: str | None = None  # what keeps the store from answering
        self.has_more = True  # a run of this round had more to send
        self._waiting = deque[PublishedRun]()  # for their turns in this round

    @property
    def is_round_over(self) -> bool:
        return not self._waiting

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
        for run in self.runs.values():
            run.end()
        self.outage = None
        self._waiting = deque(self.runs.values())

    def begin(self) -> None:
        """A new round, for those that do not pause."""
        self.has_more = False
        self._waiting.extend(run for run in self.runs.values() if not run.is_pausing)

    def turn(self) -> None:
        """The next run of the round sends one thing."""
        run = self._waiting.popleft()
        went = run.turn()
        self.has_more |= went is Went.MORE
        if run.has_worked:
            self.patience.worked()
        if went is Went.OVER:
            self.runs.pop(run.folder).let_go()
        elif went is Went.FAILED and len(self.runs) > 1 and not self.is_answered():  # a lone run's attempt asks, too
            self._waiting.appendleft(run)
        elif went in (Went.FAILED, Went.LOCKED):
            run.pause()

    def is_answered(self) -> bool:
        """Asks the store; what keeps it from answering is noted with each run."""
        self.outage = self._ask()
        if self.outage is not None:
            for run in self.runs.values():
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
        if self.outage is None and (self.has_more or any(run.waits_for_predecessor for run in self.runs.values())):
            return False
        return self.patience.silent_seconds(since=closed_at) > grace_seconds

    def sample(self) -> None:
        for run in self.runs.values():
            run.sample()

    def give_up(self) -> int:
        """Lets all go. Returns the exit code."""
        left = [run for run in self.runs.values() if not run.is_complete()]
        for run in left:
            run.say_what_is_left()
        is_broken = any(run.is_broken for run in left)
        for run in self.runs.values():
            run.let_go()
        self.runs.clear()
        return BROKEN if is_broken else NOT_DELIVERED if left else 0


def follow(rounds: Rounds, line: Line) -> int:
    """Sends the journals as they grow, until all is over and sent. Returns 0, or 3 with a rest."""
    is_over = False
    while True:
        closed_at = line.closed_at  # looked at before sending: nothing that was written before the end is missed
        for kind, folder in line.words():
            rounds.hear(kind, folder)
        if closed_at is not None and not is_over:
            is_over = True
            rounds.end_all()
        if rounds.outage is None and not rounds.is_round_over:
            rounds.turn()
        elif closed_at is not None and rounds.is_late(closed_at, grace_seconds=line.grace_seconds):
            return rounds.give_up()
        elif rounds.outage is not None:
            line.wait_for_end(rounds.patience.pause_seconds())
            rounds.is_answered()
        else:
            if not rounds.has_more:
                rounds.wait(line)
            rounds.begin()
        rounds.sample()
