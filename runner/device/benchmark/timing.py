"""Times a call on a device: seconds, as median, lowest and highest of several batches of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """A figure measured several times, in the unit of what it stands for."""

    median: float
    lowest: float
    highest: float

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.lowest * factor, self.highest * factor)

    def rate(self, amount: float) -> Spread:
        """Of seconds: how much of `amount` is done in one; the longest time is the lowest rate."""
        return Spread(amount / self.median, amount / self.highest, amount / self.lowest)


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    return Spread(statistics.median(values), min(values), max(values))


def waiter(device: torch.device) -> Callable[[], None]:
    """What returns once the device has done all it was given; the CPU is done when a call returns."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    if device.type == "xpu":
        return lambda: torch.xpu.synchronize(device)
    return lambda: None


def seconds_of(
    call: Call, wait: Callable[[], None], *, repeats: int, least_seconds: float, clock: Clock = time.perf_counter
) -> Spread:
    """Seconds of one call, from `repeats` batches of calls that follow each other without a wait between them.

    least_seconds: of a batch; its number of calls is doubled until it lasts as long, so that neither the clock nor the
    wait counts. Costs one call to warm up and up to 2 * (repeats + 2) * least_seconds, more where one call is longer.
    """
    once(call, wait, clock=clock)
    count = 1
    while once(call, wait, count=count, clock=clock) < least_seconds:
        count *= 2
    return spread([once(call, wait, count=count, clock=clock) / count for _ in range(repeats)])


def once(call: Call, wait: Callable[[], None], *, count: int = 1, clock: Clock = time.perf_counter) -> float:
    """Seconds of `count` calls and the wait for their end."""
    wait()
    began = clock()
    for _ in range(count):
        call()
    wait()
    return clock() - began


def long_enough(seconds_at: Callable[[int], float], *, first: int, most: int, least_seconds: float) -> int:
    """The first size, doubled from `first`, that takes as long; the last one up to `most` where none does."""
    size = first
    while size * 2 <= most and seconds_at(size) < least_seconds:
        size *= 2
    return size
