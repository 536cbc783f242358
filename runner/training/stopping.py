"""Decides after each step whether a training continues, saves or ends: by its limits and by signals.

OwnStopCondition is for one process, CommonStopCondition for several that must agree.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol

from runner.distributed.group import Ranks
from runner.training.signals import Stop

#: seconds until all processes know an answer
SECONDS_BETWEEN = 0.4
MOST_STEPS_BETWEEN = 5_000
#: of several answers the last one in this list counts
ANSWERS = (None, "save", "max_seconds", "stopped")


@dataclass(frozen=True)
class Limits:
    """When a training ends, whichever comes first."""

    num_epochs: int
    num_steps: int
    max_seconds: float | None = None
    patience: int | None = None  # evaluations without a better value; None: no early stopping
    save_every_seconds: float | None = None
    save_every_steps: int | None = None
    evaluate_every_steps: int | None = None  # None: after each epoch

    def room(self, step: int) -> int:
        """The number of steps after `step` until one of these numbers is reached."""
        every = [number for number in (self.save_every_steps, self.evaluate_every_steps) if number]
        return min([self.num_steps - step, *(number - step % number for number in every)])

    def evaluates_at(self, step: int) -> bool:
        """Whether the validation split is evaluated after `step`, wherever in an epoch that is."""
        return self.evaluate_every_steps is not None and step % self.evaluate_every_steps == 0


class StopCondition(Protocol):
    """Called after each step: "stopped" and "max_seconds" end the training, "save" saves a checkpoint, None continues."""

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        """at_once: after an evaluation, where the answer is "stopped" or None, and the others come after the next step."""
        ...


def make_stop_condition(stop: Stop, limits: Limits, ranks: Ranks) -> StopCondition:
    return OwnStopCondition(stop, limits) if ranks.num == 1 else CommonStopCondition(stop, limits, ranks)


class OwnStopCondition:
    """The answers of one process."""

    def __init__(self, stop: Stop, limits: Limits) -> None:
        self._stop, self._limits = stop, limits
        self._started = self._saved = time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        if self._stop.signal is not None:
            return "stopped"
        if at_once:
            return None
        now, limits = time.monotonic(), self._limits
        if limits.max_seconds is not None and now - self._started >= limits.max_seconds:
            return "max_seconds"
        by_steps = limits.save_every_steps is not None and step % limits.save_every_steps == 0
        if by_steps or (limits.save_every_seconds is not None and now - self._saved >= limits.save_every_seconds):
            self._saved = now
            return "save"
        return None


class CommonStopCondition:
    """The answers of several processes, which exchange theirs about twice a second.

    The number of steps between two exchanges depends on numbers that all processes have, so all exchange at the same
    steps. Rank 0's clock decides for all.
    """

    def __init__(self, stop: Stop, limits: Limits, ranks: Ranks) -> None:
        own = replace(limits, save_every_steps=None)  # each process counts the steps
        if not ranks.is_first:
            own = replace(own, save_every_seconds=None, max_seconds=None)
        self._own, self._ranks, self._save_every_steps = OwnStopCondition(stop, own), ranks, limits.save_every_steps
        self._pending: str | None = None  # this process's answer, which the others don't know yet
        self._next: int | None = None  # the step of the next exchange
        self._step, self._since = 0, time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        self._pending = max(self._pending, self._own(step, at_once=at_once), key=ANSWERS.index)
        if not at_once and self._next is not None and step < self._next:
            return self._by_steps(step)
        seconds = (time.monotonic() - self._since) / max(1, step - self._step)
        number, seconds = self._ranks.all_reduce_max([float(ANSWERS.index(self._pending)), seconds])
        num_steps = min(int(SECONDS_BETWEEN / max(seconds, 1e-9)), 2 * max(1, step - self._step))
        self._next = step + max(1, min(num_steps, MOST_STEPS_BETWEEN))
        self._step, self._since = step, time.monotonic()
        answer = ANSWERS[int(number)]
        if at_once and answer != "stopped":
            return None  # given after the next step
        self._pending = None
        return answer or self._by_steps(step)

    def _by_steps(self, step: int) -> str | None:
        every = self._save_every_steps
        return "save" if every is not None and step % every == 0 else None
