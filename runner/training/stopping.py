"""Says after each step whether the training goes on, saves or ends: by its limits and by signals. Asked by the loop.

OwnStopCondition is of one process, CommonStopCondition of several, which agree. Each keeps when it began and last saved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol

from runner.distributed.group import Ranks
from runner.training.signals import Stop

#: the seconds after which a word is heard by all
SECONDS_BETWEEN = 0.4
MOST_STEPS_BETWEEN = 5_000
#: what weighs more comes later: of several words the last one counts
WORDS = (None, "save", "max_seconds", "stopped")


@dataclass(frozen=True)
class Limits:
    """When a training ends, whichever comes first."""

    num_epochs: int
    num_steps: int
    max_seconds: float | None = None
    patience: int | None = None  # measurements without a better value; None: no early stopping
    save_every_seconds: float | None = None
    save_every_steps: int | None = None
    evaluate_every_steps: int | None = None  # None: at the ends of epochs

    def room(self, step: int) -> int:
        """Steps that may be taken at once after `step`, so that none of these numbers is passed by."""
        every = [number for number in (self.save_every_steps, self.evaluate_every_steps) if number]
        return min([self.num_steps - step, *(number - step % number for number in every)])

    def is_measured_at(self, step: int) -> bool:
        """Whether the validation split is measured after `step`, wherever in an epoch that is."""
        return self.evaluate_every_steps is not None and step % self.evaluate_every_steps == 0


class StopCondition(Protocol):
    """What is asked after each step: "stopped" and "max_seconds" end the training, "save" wants a checkpoint, None goes on."""

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        """at_once: at an epoch's end; there it is "stopped" or None, and no word waits for a later step."""
        ...


class OwnStopCondition:
    """The answers of one process; costs a look at the clock."""

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
        if _is_due(limits, step, now - self._saved):
            self._saved = now
            return "save"
        return None


def _is_due(limits: Limits, step: int, seconds: float) -> bool:
    by_steps = limits.save_every_steps is not None and step % limits.save_every_steps == 0
    return by_steps or (limits.save_every_seconds is not None and seconds >= limits.save_every_seconds)


class CommonStopCondition:
    """Asks each process by itself, and all of them every so many steps, as many as take about half a second.

    How many is worked out from numbers that all have: each comes to the same steps. The first one's clock is everybody's.
    """

    def __init__(self, stop: Stop, limits: Limits, ranks: Ranks) -> None:
        own = replace(limits, save_every_steps=None)  # steps are counted by all
        if not ranks.is_first:
            own = replace(own, save_every_seconds=None, max_seconds=None)
        self._alone, self._ranks, self._save_every_steps = OwnStopCondition(stop, own), ranks, limits.save_every_steps
        self._heard: str | None = None  # here, and not told yet
        self._next: int | None = None  # the step at which all are asked
        self._step, self._since = 0, time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        self._heard = max(self._heard, self._alone(step, at_once=at_once), key=WORDS.index)
        if not at_once and self._next is not None and step < self._next:
            return self._by_steps(step)
        seconds = (time.monotonic() - self._since) / max(1, step - self._step)
        number, seconds = self._ranks.all_reduce_max([float(WORDS.index(self._heard)), seconds])
        num_steps = min(int(SECONDS_BETWEEN / max(seconds, 1e-9)), 2 * max(1, step - self._step))
        self._next = step + max(1, min(num_steps, MOST_STEPS_BETWEEN))
        self._step, self._since = step, time.monotonic()
        word = WORDS[int(number)]
        if at_once and word != "stopped":
            return None  # told again after the next step
        self._heard = None
        return word or self._by_steps(step)

    def _by_steps(self, step: int) -> str | None:
        """A checkpoint that all know of, as they count the same steps."""
        every = self._save_every_steps
        return "save" if every is not None and step % every == 0 else None
