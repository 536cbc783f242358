"""Chooses how many members compute together: by the memory that one takes, and by a short measurement before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.device import backends
from runner.device.host_memory import memory_left, size_in_words
from runner.device.streams import wait_for
from runner.training.parts import Parts
from runner.training.stacked.compiled import Compiled

#: per weight: itself, its gradient, an optimizer's two numbers, the best one so far and a copy for the disk
NUMBERS_A_WEIGHT = 6
#: of the free memory, what the members' weights may take, and what their activations may
FOR_WEIGHTS, FOR_ACTIVATIONS = 0.4, 0.3
#: twice as many are tried as long as a member's time falls to this part of it
GAIN = 0.97
#: the largest part of a member's time on its own that is worth computing together, as results are not bitwise identical then
WORTH = 0.85
MOST_SECONDS = 2.0
#: of each step besides forward and backward (update, metrics): of a single run's, and once of all that compute together
HOST_SECONDS = 3e-4
#: seconds of a member's step in which nothing is left to gain: its kernels are long enough to fill the device
LONG_STEP = 0.03
REPEATS = 3


def free_bytes(device: torch.device) -> int | None:
    """Of the device; on a CPU, of what this process may take."""
    return memory_left()[0] if device.type == "cpu" else backends.free_memory_bytes(device)


def most_members(parts: Parts, *, read_bytes: int) -> int:
    """How many members the device has room for; 2**31 if that is unknown.

    read_bytes: The size of the next member's data before they are shared.
    """
    free = free_bytes(parts.device)
    weights = sum(value.nbytes for value in parts.model.state_dict().values())
    rows = sum(each.device_bytes for each in (parts.train, parts.val, parts.test) if each is not None)
    room = (
        2**31 if free is None else int((free - read_bytes) * FOR_WEIGHTS) // max(1, NUMBERS_A_WEIGHT * weights + rows)
    )
    return max(1, room)


@dataclass(frozen=True)
class GroupSize:
    """How many members compute together, why, and the seconds of a member's step, then and by its own model; with what, where
    they do so compiled."""

    num_together: int
    words: str
    seconds: float
    seconds_alone: float
    compiled: Compiled | None = None


@contextmanager
def _without_cudnn_trials() -> Iterator[None]:
    """cuDNN would try its algorithms again for each size, which takes longer than the steps."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@_without_cudnn_trials()
def choose_size(
    prepare: Callable[[int], tuple[Callable[[], object], Callable[[], object]]],
    *,
    whole: int,
    device: torch.device,
    worth: float = WORTH,
) -> GroupSize:
    """Choose how many members compute together: one, unless a larger number clearly takes less time per member.

    It times 1, 2, 4, 8, ... members, until more members gain nothing or the memory ends. The first call of a size is not
    timed: it loads kernels.

    Args:
        prepare: Makes two functions: forward and backward of the first N members, of one by its own model; and its undoing.
        worth: See WORTH.
    """
    began = time.monotonic()
    times: dict[int, float] = {}
    most, room = whole, ""
    compute, undo = prepare(1)
    saved = _saved_bytes(compute)
    undo()
    if (free := free_bytes(device)) is not None:
        most = min(whole, max(1, int(free * FOR_ACTIVATIONS) // max(1, saved)))
        room = f"; {size_in_words(free)} have room for {most}" if most < whole else ""
    size = before = 1
    while True:
        try:
            first = time.monotonic()
            compute, undo = prepare(size)
            compute()
            wait_for(device)
            undo()
            began += time.monotonic() - first
            times[size] = (_seconds(compute, undo, device) + HOST_SECONDS) / size
        except RuntimeError as error:
            if not times or not backends.is_out_of_memory(error):
                raise
            break
        gains = size < 8 or times[size] < GAIN * times[before]
        is_enough = not gains or times[1] > LONG_STEP or time.monotonic() - began > MOST_SECONDS
        if size >= most or (is_enough and size > 1):  # a single one doesn't show whether two can compute together
            break
        before, num_groups = size, -(-whole // min(2 * size, most))
        size = -(-whole // num_groups)  # of the first group: 12 of 23, not 16
        if size == before:  # the memory has room for more, and not for all of a group less
            break
    if size not in times:
        backends.empty_cache(device)
    best = min((number for number in times if number > 1), key=lambda number: times[number], default=1)
    if times[best] > worth * times[1]:
        best = 1
    tried = ", ".join(f"{1e6 * seconds:,.0f} us with {number}" for number, seconds in times.items())
    words = f"{best} of {whole} jobs compute together (a step of each: {tried}{room})"
    return GroupSize(best, words, times[best], times[1])


def _seconds(compute: Callable[[], object], undo: Callable[[], object], device: torch.device) -> float:
    least = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        compute()
        wait_for(device)
        least = min(least, time.perf_counter() - began)
        undo()
        if least > LONG_STEP:
            break
    return least


def _saved_bytes(compute: Callable[[], object]) -> int:
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(seen.values())
