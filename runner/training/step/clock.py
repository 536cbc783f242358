"""Times some steps of a training, part by part, for the report where the time went.

choose.py wraps the steps in ClockedEpochs, and fit.py reads StepClock at the end. Other steps cost one comparison of
integers. Nothing waits for the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch

from runner.device import streams
from runner.training.loop import Epochs, Progress
from runner.training.metric_buffer import SharedRows
from runner.training.step.train_step import EagerSteps, Step
from runner.training.stopping import Limits

P = ParamSpec("P")
T = TypeVar("T")

#: first steps, which compile, allocate and fill caches
WARM_STEPS = 10
#: intervals by the golden ratio avoid any period of the steps, e.g., the copies of metrics
GOLDEN = 0.6180339887
#: if the number of steps is unknown, an interval is at most this part of the steps so far
PART_OF_STEPS = 0.25
#: steps per pause of the device, which costs a step and lets kernels be timed without gaps
STEPS_A_PAUSE, MAX_PAUSES = 1_000, 10
MAX_EVENTS = 1_000
#: forward, backward and update; or step, if that is one call
PARTS = (DATA, FORWARD, BACKWARD, UPDATE, STEP, METRICS) = ("data", "forward", "backward", "update", "step", "metrics")


@dataclass(frozen=True)
class StepTimes:
    """The time of all steps of a training."""

    num_steps: int
    num_clocked: int
    warm_seconds: float  # the first steps' time beyond that of others
    parts: dict[str, float]  # the host's seconds, by PARTS
    device_seconds: float | None = None  # the kernels' time; None if the device has no clock


@dataclass
class _TimedSteps:
    num_steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class StepClock:
    """Chooses the steps to time and adds up their time; the first steps of epochs separately, all of which are timed.

    Args:
        num: The number of other steps to time, of those after `first`.
    """

    def __init__(self, num: int, *, first: int, limits: Limits, device: torch.device) -> None:
        num_steps = max(0, limits.num_steps - first)
        self.due = first
        self.warm_until = first + min(WARM_STEPS, num_steps // 4)
        self._first, self._interval, self._num_due = first, num_steps / num, 0
        self._may_end_early = limits.max_seconds is not None or limits.patience is not None or bool(limits.stop_when)
        self._warm_seconds = 0.0
        self._openings, self._others = _TimedSteps(), _TimedSteps()
        self._name, self._since = DATA, 0.0
        self._now: defaultdict[str, float] = defaultdict(float)
        self._events = _Events(device, min(MAX_PAUSES, num_steps // STEPS_A_PAUSE))

    def begin(self) -> None:
        """Start a group of steps. Its time counts as data until a part begins."""
        self._name, self._now = DATA, defaultdict(float)
        self._events.begin()
        self._since = time.perf_counter()

    def part(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        """Count the time of `call` as a part, without that of parts inside."""

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

    def end(self, step: int, num_steps: int, *, is_first: bool) -> None:
        """End a group of steps, the last of which is `step`. is_first: of its epoch."""
        began = step - num_steps
        if began < self.warm_until or began == self._first:
            self._warm_seconds += time.perf_counter() - self._since + sum(self._now.values())
            self.warm_until, self.due = max(step, self.warm_until), step
            return
        self._lap(self._name)
        self._events.end(num_steps)
        timed = self._openings if is_first else self._others
        timed.num_steps += num_steps
        for name, seconds in self._now.items():
            timed.seconds[name] += seconds
        if step >= self.due:
            self._num_due += 1
            most = (step - self._first) * PART_OF_STEPS if self._may_end_early else self._interval
            interval = min(self._interval, most) * (0.5 + self._num_due * GOLDEN % 1)
            self.due = step + max(1, int(interval))

    def times(self, seconds: float, num_steps: int) -> StepTimes:
        """Extrapolate to all steps, which took `seconds`."""
        openings, others = self._openings, self._others
        num_warm = self.warm_until - self._first
        num_usual = max(0, num_steps - num_warm)
        each = max(0, num_usual - openings.num_steps) / max(1, others.num_steps)
        totals = {name: openings.seconds[name] + each * others.seconds[name] for name in PARTS}
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
        )

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self._now[name] += now - self._since
        self._since = now


class _Events:
    """Times steps by the device's clock, if it has one.

    During a pause of the device the host queues the step, so its kernels run without gaps. Without pauses gaps count, too.
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
        """Called when the data are ready, before the step is queued."""
        if not self._has_clock or self._begun is not None or len(self._found) == MAX_EVENTS:
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
        """Seconds per step; None if the events are not over, or after a CUDA error."""
        paused = [each for each in self._found if each[3]] or self._found
        if not paused:
            return None
        try:
            seconds = sum(begun.elapsed_time(ended) for begun, ended, _, _ in paused) / 1000
        except (RuntimeError, ValueError):
            return None
        return seconds / sum(num_steps for _, _, num_steps, _ in paused)


class ClockedEpochs:
    """Times some of the steps; see loop.Epochs.

    Args:
        one_by_one: Takes the steps, except those that `epochs` takes at once.
        clocked: Its step, in parts of `clock`.
    """

    def __init__(
        self,
        epochs: Epochs,
        clock: StepClock,
        *,
        progress: Progress | SharedRows,  # both know the step
        one_by_one: EagerSteps,
        clocked: Step,
    ) -> None:
        self._epochs, self._clock, self._progress = epochs, clock, progress
        self._one_by_one, self._clocked = one_by_one, clocked
        self._next: Callable[..., int | None] = next if epochs is one_by_one else clock.part(STEP, next)

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        groups, progress, clock = self._epochs.epoch(number, first_step=first_step), self._progress, self._clock
        taken = self._take(groups, is_first=True)
        while taken is not None:
            yield taken
            taken = next(groups, None) if progress.step < clock.due else self._take(groups)

    def _take(self, groups: Iterator[int], *, is_first: bool = False) -> int | None:
        clock, one_by_one, step = self._clock, self._one_by_one, self._progress.step
        usual = one_by_one.step
        if step >= clock.warm_until:
            one_by_one.step = self._clocked
        clock.begin()
        try:
            taken = self._next(groups, None)
        finally:
            one_by_one.step = usual
        if taken is not None:
            clock.end(step + taken, taken, is_first=is_first)
        return taken
