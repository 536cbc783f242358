"""What each process is asked (an end, a checkpoint) goes in; the same answer for all of them, at the same step, comes out."""

from __future__ import annotations

import time
from dataclasses import replace

from runner.distributed.group import Ranks
from runner.training.loop import AskedAlone, Limits
from runner.training.signals import Stop

#: the seconds after which a word is heard by all
SECONDS_BETWEEN = 0.4
MOST_STEPS_BETWEEN = 5_000
#: what weighs more comes later: of several words the last one counts
WORDS = (None, "save", "max_seconds", "stopped")


class AskedTogether:
    """Asks each process by itself, and all of them every so many steps, as many as take about half a second.

    How many is worked out from numbers that all have: each comes to the same steps. The first one's clock is everybody's.
    """

    def __init__(self, stop: Stop, limits: Limits, ranks: Ranks) -> None:
        own = replace(limits, save_every_steps=None)  # steps are counted by all
        if not ranks.is_first:
            own = replace(own, save_every_seconds=None, max_seconds=None)
        self._alone, self._ranks, self._save_every_steps = AskedAlone(stop, own), ranks, limits.save_every_steps
        self._heard: str | None = None  # here, and not told yet
        self._next: int | None = None  # the step at which all are asked
        self._step, self._since = 0, time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        self._hear(self._alone(step, at_once=at_once))
        if not at_once and self._next is not None and step < self._next:
            return self._by_steps(step)
        seconds = (time.monotonic() - self._since) / max(1, step - self._step)
        number, seconds = self._ranks.highest([float(WORDS.index(self._heard)), seconds])
        num_steps = min(int(SECONDS_BETWEEN / max(seconds, 1e-9)), 2 * max(1, step - self._step))
        self._next = step + max(1, min(num_steps, MOST_STEPS_BETWEEN))
        self._step, self._since = step, time.monotonic()
        word = WORDS[int(number)]
        if at_once and word != "stopped":
            return None  # told again after the next step
        self._heard = None
        return word or self._by_steps(step)

    def _hear(self, word: str | None) -> None:
        self._heard = max(self._heard, word, key=WORDS.index)

    def _by_steps(self, step: int) -> str | None:
        """A checkpoint that all know of, as they count the same steps."""
        every = self._save_every_steps
        return "save" if every is not None and step % every == 0 else None
