"""Finds out, before the first step, whether members can take their steps together, how many at a time, or why not.

Called by sweep/jobs/run_together.py. It takes forward and backward of the first batch, and leaves all as it was.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.device import backends
from runner.device.host_memory import memory_left, size_in_words
from runner.device.streams import wait_for
from runner.errors import CODE_ERRORS, first_line
from runner.training.carried_state import CarriedState, TensorCopies, restored
from runner.training.parts import Parts
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.fit import Member, stacked_batches, world
from runner.training.stacked.stack import CannotStackError, ModelStack
from runner.training.stacked.step import StackedGradients, check_optimizer
from runner.training.step.choose import how_to_compile

#: members whose first step is compared with the same step on its own, besides one of each setting
MAX_COMPARED = 4
#: the keys of what computes a loss
FORWARD_KEYS = ("model.", "task.")
#: what a separate job costs besides its training: its process, its plots
START_SECONDS = 3.0
#: of the time of its steps, what is to be gained for each job
MIN_GAIN = 0.05
#: relative: rounding is 1e-6, another mask or a weight's other value are 1e-2
TOLERANCE = 1e-3
#: relative, of weights, to see what rounding does to a model's gradients: where one value of a ReLU or a maximum falls on
#: the other side, it is 1e-2 of a layer's (a CNN of the digits, torch 2.13, 2026-11); and what is more than rounding
NUDGE, MOST = 1e-4, 0.2
#: per weight: itself, its gradient, an optimizer's two numbers, the best one so far and a copy for the disk
NUMBERS_A_WEIGHT = 6
#: of the free memory, what the members' weights may take, and what their activations may
WEIGHTS_SHARE, ACTIVATIONS_SHARE = 0.4, 0.3
#: twice as many are tried as long as a member's time falls to this part of it
GAIN = 0.97
#: the largest part of a member's time on its own that is worth computing together, as results are not bitwise identical then
WORTH = 0.85
MAX_SECONDS = 2.0
#: of each step besides forward and backward (update, metrics): of a single run's, and once of all that compute together
HOST_SECONDS = 3e-4
#: seconds of a member's step in which nothing is left to gain: its kernels are long enough to fill the device
LONG_STEP = 0.03
REPEATS = 3


@dataclass(frozen=True)
class GroupSize:
    """How many members compute together and why, and the seconds of a member's step, together and by its own model."""

    num_together: int
    words: str
    seconds: float
    seconds_alone: float
    compiled: Compiled | None = None


def free_bytes(device: torch.device) -> int | None:
    """Of the device; on a CPU, of what this process may take."""
    return memory_left()[0] if device.type == "cpu" else backends.free_memory_bytes(device)


def most_members(parts: Parts, *, read_bytes: int) -> int:
    """How many members the device has room for; 2**31 if that is unknown.

    read_bytes: The size of the next member's data before they are shared.
    """
    if (free := free_bytes(parts.device)) is None:
        return 2**31
    weights = sum(value.nbytes for value in parts.model.state_dict().values())
    rows = sum(each.device_bytes for each in parts.loaders)
    room = int((free - read_bytes) * WEIGHTS_SHARE)
    num_members: int = room // max(1, NUMBERS_A_WEIGHT * weights + rows)
    return max(1, num_members)


def check_alike(members: Sequence[Member], *, is_asked: bool) -> GroupSize:
    """Measure how many members to train together, and compare the first batch's forward and backward pass.

    Some members also compute it on their own, eagerly: both must give the same, except for what rounding does to a single
    one. Weights, buffers and generators are restored.

    Args:
        is_asked: Train together also if nothing is gained by it.

    Raises:
        CannotStackError: With the reason.
    """
    parts = [member.parts for member in members]
    if any(each.train.indexed() is None for each in parts):
        raise CannotStackError("its rows are streamed")
    for each in parts:
        check_optimizer(each.optimizer)
    if len({(each.train.num_rows, each.train.batch_size) for each in parts}) > 1:
        raise CannotStackError("their training splits have different numbers of rows")
    batches = [next(iter(each.train.epoch(0))) for each in parts]
    buffers = TensorCopies(buffer for each in parts for buffer in each.model.buffers())
    for each in parts:
        each.model.train()
    ModelStack(parts)  # raises for other shapes
    model, task = parts[0].model, parts[0].task  # through which all of them are computed
    carried = CarriedState(model, task, device=parts[0].device)
    with restored(model, task):
        try:
            size, together = _together(members, batches)
        finally:
            buffers.put_back()
            if names := carried.replaced():  # the reason of whatever else went wrong
                raise CannotStackError(f"forward replaces `{names[0]}`, which all of them would share")
    for number in _to_compare(members) if together else ():
        try:
            _compare(members[number], batches[number], together[number], whole=len(parts))
        finally:
            buffers.put_back()
    starting = START_SECONDS + (size.compiled.seconds if size.compiled else 0.0)
    gained = (size.seconds_alone - size.seconds) * parts[0].limits.num_steps + starting
    if not is_asked and gained < MIN_GAIN * size.seconds_alone * parts[0].limits.num_steps:
        raise CannotStackError(f"that gains nothing: {size.words}")
    return size


def _to_compare(members: Sequence[Member]) -> list[int]:
    settings = [
        tuple((key, repr(value)) for key, value in member.settings.experiment.items() if key.startswith(FORWARD_KEYS))
        for member in members
    ]
    last = len(members) - 1
    return sorted({0, last, *range(0, len(members), -(-len(members) // MAX_COMPARED)), *map(settings.index, settings)})


def _together(members: Sequence[Member], batches: Sequence[Any]) -> tuple[GroupSize, list[list[Tensor]]]:
    """Choose a size; returns it with the loss and the gradients of each member, none if they are trained one by one."""
    parts, states = members[0].parts, [member.generators for member in members]
    is_compiled = members[0].settings.train.compile  # once for all that compute together
    notes, each = list[str](), list[list[Tensor]]()
    compiled = Compiled(how_to_compile(parts, is_alone=True), notes.append)
    buffers = TensorCopies(parts.model.buffers())

    def stacked(some: slice, compiled: Compiled | None = None) -> tuple[ModelStack, StackedGradients]:
        stack = ModelStack([member.parts for member in members[some]])
        gradients = StackedGradients(stack, compiled=compiled)
        gradients.draw_from(states[some])
        return stack, gradients

    def prepare(num: int) -> tuple[Callable[[], object], Callable[[], object]]:
        if num == 1:
            return partial(_loss_and_gradients, parts, batches[0]), buffers.put_back
        _, gradients = stacked(slice(0, num))
        return partial(gradients.compute, [stacked_batches(batches[:num])]), gradients.undo

    try:
        with warnings.catch_warnings(), world(states[0], parts.device):
            warnings.filterwarnings("error", message="There is a performance drop")  # it would loop over the members
            size = choose_size(
                prepare, whole=len(members), device=parts.device, worth=math.inf if is_compiled else WORTH
            )
            num = size.num_together
            for some in (slice(at, at + num) for at in range(0, len(members), num) if num > 1):
                stack, gradients = stacked(some, compiled if is_compiled else None)
                losses = next(iter(gradients.compute([stacked_batches(batches[some])]).values()))
                each += [[loss, *_gradients(whole)] for loss, whole in zip(losses, stack.wholes, strict=True)]
                gradients.undo()
    except CannotStackError:
        raise
    except CODE_ERRORS as error:
        problem = "the memory is too small for a step of one of them and the others' weights"
        raise CannotStackError(problem if backends.is_out_of_memory(error) else _in_words(error)) from error
    if each and is_compiled and not compiled.why_not:
        notes.append(f"compile: forward and backward are one function; made in {compiled.seconds:.1f} s")
        size = replace(size, compiled=compiled)
    return replace(size, words="; ".join([size.words, *notes])), each


def _loss_and_gradients(parts: Parts, batch: Any) -> list[Tensor]:
    with parts.precision.autocast():
        values = parts.task(parts.model, batch)
    loss = next(iter(values.values()))
    loss.backward()
    gradients = _gradients(parts.model)
    parts.model.zero_grad()
    return [loss.detach(), *gradients]


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def _compare(member: Member, batch: Any, together: Sequence[Tensor], *, whole: int) -> None:
    alone = _alone(member, batch)
    if len(alone) != len(together):
        raise CannotStackError("together, other weights get gradients than in a single run")
    apart = _apart(alone, together)
    if apart[0] > TOLERANCE:
        what = "its loss is"
    elif max(apart) > TOLERANCE and max(apart) > min(2 * max(_apart(alone, _alone(member, batch, nudge=NUDGE))), MOST):
        what = "its gradients are"
    else:
        return
    raise CannotStackError(f"of {whole} together, {what} not as in a single run: what it computes depends on more")


def _apart(alone: Sequence[Tensor], other: Sequence[Tensor]) -> list[float]:
    largest = max(float(each.norm()) for each in alone[1:] or alone)
    found = []
    for own, theirs in zip(alone, other, strict=True):
        distance, size = float((own - theirs.detach()).norm()), max(float(own.norm()), 1e-3 * largest)
        if math.isnan(distance):  # max() takes it for less than any number
            found.append(math.inf)
        else:
            found.append(max(0.0, distance - 1e-7) / size if size else float(distance > 1e-7))
    return found


def _alone(member: Member, batch: Any, *, nudge: float = 0.0) -> list[Tensor]:
    weights, draw = [value.detach() for value in member.parts.model.parameters()], torch.Generator().manual_seed(0)
    before = TensorCopies(weights)
    for weight in weights if nudge else ():
        weight.mul_(1 + nudge * torch.randn(weight.shape, generator=draw).to(weight))
    with world(member.generators, member.parts.device):
        computed = _loss_and_gradients(member.parts, batch)
    before.put_back()
    return computed


def _in_words(error: BaseException) -> str:
    said = str(error)
    operation = next((part.strip("`'\".,;") for part in said.split() if "aten::" in part), "one of its operations")
    by_values, in_place = (
        "what it does depends on values of tensors",
        "it writes into a tensor in place that is one for all of them",
    )
    usual = {
        "randomness error mode": "it draws random numbers by other means than dropout",
        ".item()": f"{by_values} (.item())",
        "data-dependent control flow": f"{by_values} (if, while)",
        "dynamic shape": f"{by_values} (rows that a mask chooses)",
        "doesn't match the broadcast shape": in_place,
        "inplace": in_place,
        "performance drop": f"torch can't take {operation} for several models at once",
        "Batching rule not implemented": f"torch can't take {operation} for several models at once",
    }
    return next(
        (reason for sign, reason in usual.items() if sign in said), f"{type(error).__name__}: {first_line(error)}"
    )


@contextmanager
def _without_cudnn_trials() -> Iterator[None]:
    """Turn off cuDNN's trials of its algorithms, which take longer than the steps of a size."""
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
        most = min(whole, max(1, int(free * ACTIVATIONS_SHARE) // max(1, saved)))
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
        is_enough = not gains or times[1] > LONG_STEP or time.monotonic() - began > MAX_SECONDS
        if size >= most or (is_enough and size > 1):  # a single one doesn't show whether two can compute together
            break
        before, size = size, min(2 * size, most)
    if size not in times:
        backends.empty_cache(device)
    best = min((number for number in times if number > 1), key=lambda number: times[number], default=1)
    if times[best] > worth * times[1]:
        best = 1
    num_together = -(-whole // -(-whole // best))  # of groups of one size: 12 of 23, not 16
    tried = ", ".join(f"{1e6 * seconds:,.0f} us with {number}" for number, seconds in times.items())
    words = f"{num_together} of {whole} jobs compute together (a step of each: {tried}{room})"
    return GroupSize(num_together, words, times[best], times[1])


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
