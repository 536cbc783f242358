"""Says line by line what of a training works and how long it took, for `train.check`. Called by fit.py after each part.

Keeps the time of the last line, and of each step. It waits for the device, as what is queued has not worked yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from runner.training.loop import Epochs

STEPS = 2  # the first is watched, and finds memory and kernels; the second is as fast as others, or nearly


class Checklist:
    """The lines of one training."""

    def __init__(self, device: torch.device, *, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self._since = time.perf_counter()

    def passed(self, what: str) -> None:
        """One line: it works, and took the time since the line before."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        before, self._since = self._since, time.perf_counter()
        self._say(f"check:  {what} ({self._since - before:.2f} s)")


class TimedSteps:
    """Epochs as they are, each of whose steps is waited for and timed; see loop.Epochs."""

    def __init__(self, epochs: Epochs, device: torch.device) -> None:
        self.seconds: list[float] = []  # of each word of the epochs: a step, or several that are taken at once
        self._epochs, self._device = epochs, device

    @property
    def steps_per_epoch(self) -> int:
        return self._epochs.steps_per_epoch

    def in_words(self, num_steps: int, *, of: int | None) -> str:
        """What is said of steps that were taken. of: a whole run's (None: the others may take another time)."""
        each = ", then ".join(f"{seconds:.3f} s" for seconds in self.seconds)
        words = f"{num_steps} optimizer {'step' if num_steps == 1 else 'steps'}: {each}"
        if of is None or len(self.seconds) < STEPS:
            return words
        return f"{words}; all {of:,} take {_in_words(of * self.seconds[-1])} if each is like the last"

    def steps(self, epoch: int, *, first_step: int = 0) -> Iterator[int]:
        steps = self._epochs.steps(epoch, first_step=first_step)
        while True:
            began = time.perf_counter()
            if (taken := next(steps, None)) is None:
                return
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self.seconds.append(time.perf_counter() - began)
            yield taken


def _in_words(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
