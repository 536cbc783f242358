"""Clocks some steps of a training, spread over it, part by part: of these it is said where the time went.

choose.py has the steps go through ClockedEpochs, and fit.py asks StepClock at the end. A step that is not clocked pays one
comparison of integers; nothing here waits for the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from runner.device import streams
from runner.device.placement import num_bytes
from runner.training.loop import Epochs
from runner.training.progress import Progress
from runner.training.step.train_step import EagerSteps, Step
from runner.training.stopping import Limits

P = ParamSpec("P")
T = TypeVar("T")

#: steps at the beginning that are clocked as a whole: they compile, find memory, fill caches
WARM_STEPS = 10
#: that keep clear of any period that steps have, such as the copies of metrics
GOLDEN = 0.6180339887
#: see StepClock
DOUBLED, MOST_TIMES = 8, 64
#: steps for each whose kernels are clocked alone, behind a pause of the device: that costs a step
STEPS_A_PAUSE, MOST_PAUSES = 1_000, 10
#: forward, backward and update, or step where that is one call
PARTS = (DATA, FORWARD, BACKWARD, UPDATE, STEP, METRICS) = ("data", "forward", "backward", "update", "step", "metrics")


@dataclass(frozen=True)
class StepTimes:
    """What the steps of a training took, all of them.

    warm_seconds: of the first ones beyond what others take. parts: the host's seconds, by PARTS. device_seconds: of the
    kernels, where the device has clocks (None: it has none). batch_bytes: of the first batch that was clocked.
    """

    num_steps: int
    num_clocked: int
    warm_seconds: float
    parts: dict[str, float]
    device_seconds: float | None = None
    batch_bytes: int | None = None
    is_shared: bool = False  # by trainings that take their steps together


@dataclass
class _Clocked:
    num_words: int = 0
    num_steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class StepClock:
    """Says which step is clocked next, and keeps what those before took: the first ones of epochs apart from the others."""

    def __init__(self, num: int, *, first: int, limits: Limits, device: torch.device) -> None:
        """num: steps to clock, of those after `first`."""
        num_steps = max(0, limits.num_steps - first)
        self.due = first
        self.warm_until = first + min(WARM_STEPS, num_steps // 4)
        self._num, self._stride = num, max(1.0, num_steps / num)
        # where nobody knows how many there will be, close together first: each DOUBLED clocked ones twice as far apart
        is_open = limits.max_seconds is not None or limits.patience is not None
        self._apart = max(1.0, self._stride / MOST_TIMES) if is_open else self._stride
        self._number = self._epochs = self._warm_epochs = 0
        self._first, self._warm_seconds = first, 0.0
        self._openings, self._others = _Clocked(), _Clocked()
        self._name, self._since = DATA, 0.0
        self._now: defaultdict[str, float] = defaultdict(float)
        self._batch_bytes: int | None = None
        self._events = _Events(device, min(MOST_PAUSES, num_steps // STEPS_A_PAUSE))

    def opens(self) -> bool:
        """Called as an epoch begins: whether its first word is clocked; of many epochs some are."""
        self._epochs += 1
        return self._openings.num_words * 2 < self._num or self._epochs & (self._epochs - 1) == 0

    def begin(self) -> None:
        """What comes is the data's, until a part begins."""
        self._name, self._now = DATA, defaultdict(float)
        self._events.begin()
        self._since = time.perf_counter()

    def part(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        """`call`, whose time is this part's, but for that of parts in it."""

        def clocked(*args: P.args, **kwargs: P.kwargs) -> T:
            outer = self._name
            self._lap(outer)
            if outer == DATA:
                self._events.pause(self._since)
            self._name = name
            try:
                return call(*args, **kwargs)
            finally:
                self._lap(name)
                self._name = METRICS if outer == DATA else outer

        return clocked

    def with_batch_size(self, step: Step) -> Step:
        """Return a step that notes how many bytes its first batch has."""

        def take(batches: Sequence[Any]) -> Mapping[str, Tensor]:
            if self._batch_bytes is None:
                self._batch_bytes = num_bytes(batches[0])
            return step(batches)

        return take

    def end(self, step: int, num_steps: int, *, is_first: bool) -> None:
        """A word is over, after which the training is at `step`. is_first: of its epoch."""
        began = step - num_steps
        if began < self.warm_until or began == self._first:
            self._warm_seconds += time.perf_counter() - self._since + sum(self._now.values())
            self._warm_epochs += is_first
            self.warm_until, self.due = max(step, self.warm_until), step
            return
        self._lap(self._name)
        self._events.end(num_steps)
        found = self._openings if is_first else self._others
        found.num_words += 1
        found.num_steps += num_steps
        for name, seconds in self._now.items():
            found.seconds[name] += seconds
        if step < self.due:
            return
        self._number += 1
        if self._number % DOUBLED == 0:
            self._apart = min(self._stride, 2 * self._apart)
        self.due = step + max(1, int(self._apart * (0.5 + self._number * GOLDEN % 1)))

    def times(self, seconds: float, num_steps: int) -> StepTimes:
        """Of all steps, which took so long together."""
        openings, others = self._openings, self._others
        num_warm = self.warm_until - self._first
        num_usual = max(0, num_steps - num_warm)
        num_openings = self._epochs - self._warm_epochs if openings.num_words and others.num_words else 0
        each_opening = num_openings / max(1, openings.num_words)  # so many stand behind one that was clocked
        rest = others if others.num_words else openings
        each_step = max(0.0, num_usual - each_opening * openings.num_steps) / max(1, rest.num_steps)
        totals = {name: each_opening * openings.seconds[name] + each_step * rest.seconds[name] for name in PARTS}
        known = sum(totals.values())
        usual = known / num_usual if num_usual else 0.0
        warm = min(seconds, max(0.0, self._warm_seconds - num_warm * usual)) if known else seconds
        factor = (seconds - warm) / known if known else 0.0
        on_device = self._events.seconds_a_step()
        return StepTimes(
            num_steps=num_steps,
            num_clocked=openings.num_steps + others.num_steps,
            warm_seconds=warm,
            parts={name: value * factor for name, value in totals.items() if value},
            device_seconds=None if on_device is None else on_device * num_steps,
            batch_bytes=self._batch_bytes,
        )

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self._now[name] += now - self._since
        self._since = now


class _Events:
    """The device's own clock around clocked steps, of a device that has one; nothing elsewhere.

    Behind a pause of the device, in which the host queues the step, kernels follow each other without a gap: what they
    take is theirs alone. Where no step is worth a pause, gaps count too.
    """

    def __init__(self, device: torch.device, num_pauses: int) -> None:
        self._device, self._pauses_left, self._is_paused = device, num_pauses, False
        self._has_clock = streams.has_clock(device)
        self._step_seconds, self._began = 0.0, 0.0
        self._begun: torch.Event | None = None
        self._found: list[tuple[torch.Event, torch.Event, int, bool]] = []

    def begin(self) -> None:
        self._begun = None

    def pause(self, now: float) -> None:
        """The data is there, and the step is about to be queued. Called once a word, or for each part of one."""
        if not self._has_clock or self._begun is not None:
            return
        self._is_paused = self._pauses_left > 0 and self._step_seconds > 0
        if self._is_paused:
            self._pauses_left -= 1
            self._is_paused = streams.pause(self._device, self._step_seconds)
        self._began, self._begun = now, streams.time_event(self._device)

    def end(self, num_steps: int) -> None:
        if self._begun is not None and num_steps:
            self._step_seconds = time.perf_counter() - self._began
            self._found.append((self._begun, streams.time_event(self._device), num_steps, self._is_paused))

    def seconds_a_step(self) -> float | None:
        """Reads the events; None where the device can't say: they are not over, or an error of CUDA's keeps all of its calls
        from working (asked at the end of a training that failed)."""
        paused = [found for found in self._found if found[3]] or self._found
        if not paused:
            return None
        try:
            seconds = sum(begun.elapsed_time(ended) for begun, ended, _, _ in paused) / 1000
        except (RuntimeError, ValueError):
            return None
        return seconds / sum(num_steps for _, _, num_steps, _ in paused)


class ClockedEpochs:
    """Epochs as they are, of which some steps are clocked; see loop.Epochs."""

    def __init__(
        self, epochs: Epochs, clock: StepClock, *, progress: Progress, one_by_one: EagerSteps, clocked: Step
    ) -> None:
        """one_by_one: takes the steps, but those that `epochs` takes at once. clocked: its step, in parts of `clock`."""
        self._epochs, self._clock, self._progress = epochs, clock, progress
        self._one_by_one, self._clocked = one_by_one, clocked
        self._next: Callable[..., int | None] = next if epochs is one_by_one else clock.part(STEP, next)

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        words, progress, clock = self._epochs.epoch(number, first_step=first_step), self._progress, self._clock
        taken = self._take(words, is_first=True) if clock.opens() else next(words, None)
        while taken is not None:
            yield taken
            taken = next(words, None) if progress.step < clock.due else self._take(words)

    def _take(self, words: Iterator[int], *, is_first: bool = False) -> int | None:
        clock, one_by_one, step = self._clock, self._one_by_one, self._progress.step
        usual = one_by_one.step
        if step >= clock.warm_until:
            one_by_one.step = self._clocked
        clock.begin()
        try:
            taken = self._next(words, None)
        finally:
            one_by_one.step = usual
        if taken is not None:
            clock.end(step + taken, taken, is_first=is_first)
        return taken
