"""Takes a step again at a run's end, with copies and some rows: what of it is the host's, its arithmetic, a person's Python.

For experiment/advice.py, once the training is over; nothing of the run is touched. It takes no longer than it is given.
"""

from __future__ import annotations

import cProfile
import math
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.device import backends
from runner.device.hardware import num_usable_cpus
from runner.device.placement import copied, map_tensors, num_bytes, num_rows
from runner.inspection.call_site import is_own
from runner.training.cpu_threads import Products
from runner.training.optimizer import Turns
from runner.training.parts import Parts
from runner.training.step.clock import BACKWARD, FORWARD, STEP, StepTimes, few_rows

#: a model of so many bytes is not copied: its kernels take longer than what calls them
MOST_BYTES = 2**28
MOST_REPEATS, FEW_ROWS, MANY_ROWS = 10, 2, 16
MANY_STEPS, MOST_PROFILED, DISTURBED = 600, 3, 3
#: turns with more threads and as many as now, after one to start them; the seconds that these may take whatever is left,
#: and the share of all steps; and of a batch, what is too few rows to tell
THREAD_TURNS, THREAD_SECONDS, THREAD_SHARE, FEWEST = 3, 0.05, 0.01, 1 / 8
#: of memory, where nothing was measured; and how often a step goes through the weights: forward, backward, gradients
BYTES_PER_SECOND, WEIGHT_PASSES = 1e10, 3
#: the profiler's word for the file of what is no Python
BUILT_IN = "~"
#: of tensors, that bring a value to the host
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")


@dataclass(frozen=True)
class OwnPython:
    """The function of a person's that takes most of a step by itself: in Python, or in what it calls that is not torch."""

    where: str  # net.py:12 in forward
    share: float  # of forward and backward
    num_reads: int  # of the device


@dataclass(frozen=True)
class StepCosts:
    """Of one step of a run. launch: the share of the host's calls in forward and backward, on a CPU. None: not known.

    with_threads: all threads of the CPU, and what forward and backward take with them at most, of what they take.
    """

    launch: float | None = None
    flops: float | None = None
    own: OwnPython | None = None
    with_threads: tuple[int, float] | None = None


def look(parts: Parts, times: StepTimes, *, accumulate_steps: int, within: float) -> StepCosts:
    """within: seconds; what would take longer is left out, but for one step with few rows. Of many steps three more are had.

    accumulate_steps: batches a step, of which one is looked at.
    Raises: what the model or its task raises.
    """
    kept = times.kept or _first_rows(parts)
    usual = max(1, times.num_steps) * accumulate_steps
    a_step = sum(times.parts.get(name, 0.0) for name in (FORWARD, BACKWARD, STEP)) / usual
    if kept is None or isinstance(parts.optimizer, Turns) or num_bytes(parts.model.state_dict()) > MOST_BYTES:
        return StepCosts()
    states = backends.generator_states(parts.device)
    try:
        within = max(within, 3 * a_step if usual >= MANY_STEPS else 0.0)
        found = _look(parts, *kept, a_step=a_step, num_steps=usual, ends=time.perf_counter() + within)
    finally:
        backends.set_generator_states(states, parts.device)
    return replace(found, flops=found.flops and found.flops * accumulate_steps)


def _look(parts: Parts, some: Any, rows: int, *, a_step: float, num_steps: int, ends: float) -> StepCosts:
    take = _copied(parts)
    few, whole, many = (partial(take, _of_rows(some, count)) for count in (FEW_ROWS, rows, max(rows, MANY_ROWS)))
    of_few, found = _seconds(few, ends=0.0), StepCosts()
    if time.perf_counter() + 2 * a_step < ends:
        found = replace(found, own=_own_python(whole, a_step, ends=ends - (ends - time.perf_counter()) / 4))
    if parts.device.type == "cpu" and time.perf_counter() + 2 * of_few < ends:
        found = replace(
            found, launch=_launch(few, many, rows, weights=num_bytes(dict(parts.model.named_parameters())), ends=ends)
        )
    most = num_usable_cpus()
    may_pay = found.launch is not None and found.launch < 1 / 2 and torch.get_num_threads() < most
    if may_pay and not _is_busy(most):
        seconds = max(ends - time.perf_counter(), min(THREAD_SECONDS, THREAD_SHARE * a_step * num_steps))
        share = min(1.0, seconds / max(a_step * (2 * THREAD_TURNS + 1), 1e-9))
        if share >= FEWEST:
            some_rows = partial(take, _of_rows(some, math.ceil(share * rows)))
            found = replace(found, with_threads=(most, _with_threads(some_rows, most, first=few)))
    if time.perf_counter() + 5 * of_few < ends:
        with Products() as products:
            few()
        found = replace(found, flops=products.flops * rows / FEW_ROWS)
    return found


def _launch(few: Callable[[], None], many: Callable[[], None], rows: int, *, weights: int, ends: float) -> float:
    """The share of a step of so many rows that it would take without any. weights: their bytes, which are no calls' either.

    By two sizes: what is left of the line through both at no rows.
    """
    middle = time.perf_counter() + (ends - time.perf_counter()) / 3
    of_few, of_many = _seconds(few, ends=middle), _seconds(many, ends=middle + (ends - middle) / 2)
    num_many = max(rows, MANY_ROWS)
    a_row = max(0.0, (of_many - of_few) / (num_many - FEW_ROWS))
    launch = of_few - FEW_ROWS * a_row - weights * WEIGHT_PASSES / BYTES_PER_SECOND
    return min(1.0, max(0.0, launch / (of_few + (rows - FEW_ROWS) * a_row)))


def _copied(parts: Parts) -> Callable[[Any], None]:
    task, model = copied((parts.task, parts.model))

    def take(batch: Any) -> None:
        with parts.precision.autocast():
            loss = next(iter(task(model, batch).values()))
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    for module in (task, model):
        if isinstance(module, nn.Module):
            module.train()
    return take


def _first_rows(parts: Parts) -> tuple[Any, int] | None:
    if parts.train.indexed() is None:
        return None
    batch = next(iter(parts.train.epoch(0)))
    return few_rows(batch), num_rows(batch)


def _of_rows(some: Any, rows: int) -> Any:
    here = num_rows(some)

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != here:
            return tensor
        return tensor.repeat(-(-rows // here), *[1] * (tensor.dim() - 1))[:rows]

    return map_tensors(some, repeated)


def _seconds(take: Callable[[], None], *, ends: float) -> float:
    taken: list[float] = []
    while not taken or (len(taken) <= MOST_REPEATS and time.perf_counter() + taken[0] < ends):
        began = time.perf_counter()
        take()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _with_threads(take: Callable[[], None], most: int, *, first: Callable[[], None]) -> float:
    """What it takes with so many threads, of what it takes with as many as now: the middle of some turns, one of which others
    may disturb (one gain of three was not told, 2026-11).

    It ends once most turns gain nothing: threads that wait for a busy CPU take many times as long. first: a small one, with
    which they begin.
    """
    now, ratios = torch.get_num_threads(), list[float]()

    def seconds(threads: int, take: Callable[[], None]) -> float:
        torch.set_num_threads(threads)
        return _seconds(take, ends=0.0)

    try:
        seconds(most, first)
        for _ in range(THREAD_TURNS):
            ratios.append(seconds(most, take) / seconds(now, take))
            if sum(ratio >= 1 for ratio in ratios) > THREAD_TURNS // 2:
                break
    finally:
        torch.set_num_threads(now)
    return statistics.median(ratios)


def _is_busy(cpus: int) -> bool:
    """Whether others want the CPUs: threads then wait for each other, and one try took 0.7 s in the place of 0.05 (2026-11)."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cpus


def _own_python(take: Callable[[], None], a_step: float, *, ends: float) -> OwnPython | None:
    quickest: tuple[float, Any] = (math.inf, None)
    for _ in range(MOST_PROFILED):
        profile = cProfile.Profile()
        try:
            profile.runcall(take)
        except ValueError:  # another one watches this process
            return None
        calls = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        total = sum(own for _, _, own, _, _ in calls.values())
        quickest = min(quickest, (total, calls), key=lambda one: one[0])
        if time.perf_counter() + total > ends and total < DISTURBED * a_step:
            break
    return _of_persons(*quickest)


def _of_persons(total: float, calls: Any) -> OwnPython | None:
    """Of a profile's calls, the person's function that takes most with what it calls and is not torch's."""
    seconds: dict[Any, float] = {place: own for place, (_, _, own, _, _) in calls.items() if _is_persons(place[0])}
    reads = dict.fromkeys(seconds, 0)
    for (file, _, name), (*_, callers) in calls.items():
        is_read = "TensorBase" in name and name.split("'")[1] in READS
        if _is_persons(file) or (not is_read and ("torch" in name or f"{os.sep}torch{os.sep}" in file)):
            continue
        for place, (_, count, _, whole) in callers.items():
            if place in seconds:
                seconds[place] += whole
                reads[place] += count if is_read else 0
    if not seconds or not total:
        return None
    place = max(seconds, key=lambda one: seconds[one])
    num_reads = sum(count for other, count in reads.items() if _stands_in(other, place, among=seconds))
    return OwnPython(f"{Path(place[0]).name}:{place[1]} in {place[2]}", seconds[place] / total, num_reads)


def _stands_in(inner: Any, place: Any, *, among: Iterable[Any]) -> bool:
    if inner == place or inner[0] != place[0] or not inner[2].startswith("<"):
        return bool(inner == place)
    lines = [line for file, line, name in among if file == place[0] and line <= inner[1] and not name.startswith("<")]
    return bool(lines) and max(lines) == place[1]


def _is_persons(file: str) -> bool:
    return file != BUILT_IN and is_own(file)
