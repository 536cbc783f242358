"""Finds out, before the first step, whether members can take their steps together, how many at a time, or why not.

Called by experiment/together.py. It takes forward and backward of the first batch, and leaves all as it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.device import backends
from runner.errors import OF_CODE, first_line
from runner.training.carried_state import CarriedState, restored
from runner.training.parts import Parts
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.fit import Member, stacked_batches, world
from runner.training.stacked.size import WORTH, GroupSize, choose_size
from runner.training.stacked.stack import CannotStackError, ModelStack
from runner.training.stacked.step import StackedGradients
from runner.training.stacked.update import check_optimizer
from runner.training.step.choose import how_to_compile

#: members whose first step is compared with the same step on its own, besides one of each setting
MOST_COMPARED = 4
#: the keys of what computes a loss
OF_A_FORWARD = ("model.", "task.")
#: what a separate job costs besides its training: its process, its plots
START_SECONDS = 3.0
#: of the time of its steps, what is to be gained for each job
LEAST_GAIN = 0.05
#: relative: rounding is 1e-6, another mask or a weight's other value are 1e-2
TOLERANCE = 1e-3
#: relative, of weights, to see what rounding does to a model's gradients: where one value of a ReLU or a maximum falls on
#: the other side, it is 1e-2 of a layer's (a CNN of the digits, torch 2.13, 2026-11); and what is more than rounding
NUDGE, MOST = 1e-4, 0.2


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
    shapes = {(each.train.num_rows, each.train.batch_size) for each in parts}
    if len(shapes) > 1:
        raise CannotStackError("their training splits have different numbers of rows")
    batches = [next(iter(each.train.epoch(0))) for each in parts]
    before = [[buffer.clone() for buffer in each.model.buffers()] for each in parts]
    for each in parts:
        each.model.train()
    stack = ModelStack(parts)
    model, task = parts[0].model, parts[0].task  # through which all of them are computed
    carried = CarriedState(model, task, device=parts[0].device)
    with restored(model, task):
        try:
            size, together = _together(stack, members, batches)
        finally:
            _put_back(parts, before)
            if names := carried.replaced():  # the reason of whatever else went wrong
                raise CannotStackError(f"forward replaces `{names[0]}`, which all of them would share")
    for number in _to_compare(members) if together else ():
        try:
            _compare(members[number], batches[number], together[number], whole=len(parts))
        finally:
            _put_back(parts, before)
    starting = START_SECONDS + (size.compiled.seconds if size.compiled else 0.0)
    gained = (size.seconds_alone - size.seconds) * parts[0].limits.num_steps + starting
    if not is_asked and gained < LEAST_GAIN * size.seconds_alone * parts[0].limits.num_steps:
        raise CannotStackError(f"that gains nothing: {size.words}")
    return size


def _to_compare(members: Sequence[Member]) -> list[int]:
    settings = [
        tuple((key, repr(value)) for key, value in member.settings.experiment.items() if key.startswith(OF_A_FORWARD))
        for member in members
    ]
    last = len(members) - 1
    return sorted({0, last, *range(0, len(members), -(-len(members) // MOST_COMPARED)), *map(settings.index, settings)})


def _together(
    stack: ModelStack, members: Sequence[Member], batches: Sequence[Any]
) -> tuple[GroupSize, list[list[Tensor]]]:
    """Choose a size; returns it with the loss and the gradients of each member, none if they are trained one by one."""
    parts, states = members[0].parts, [member.generators for member in members]
    is_compiled = members[0].settings.train.compile  # once for all that compute together
    notes, each = list[str](), list[list[Tensor]]()
    compiled = Compiled(how_to_compile(parts, is_alone=True), list(stack.numbers), notes.append)

    buffers = list(parts.model.buffers())
    before = [buffer.clone() for buffer in buffers]

    def undo_one() -> None:
        parts.model.zero_grad()
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

    def prepare(num: int) -> tuple[Callable[[], object], Callable[[], object]]:
        if num == 1:
            return partial(_loss_and_gradients, parts, batches[0]), undo_one
        gradients, group = StackedGradients(stack, slice(0, num)), [stacked_batches(batches[:num])]
        gradients.draw_from(states[:num])
        return partial(gradients.compute, group), gradients.undo

    try:
        with warnings.catch_warnings(), world(states[0], parts.device):
            warnings.filterwarnings("error", message="There is a performance drop")  # it would loop over the members
            size = choose_size(prepare, whole=len(stack), device=parts.device, worth=math.inf if is_compiled else WORTH)
            num = size.num_together
            for some in (slice(at, at + num) for at in range(0, len(stack), num) if num > 1):
                gradients = StackedGradients(stack, some, compiled=compiled if is_compiled else None)
                gradients.draw_from(states[some])
                losses = next(iter(gradients.compute([stacked_batches(batches[some])]).values()))
                each += [[loss, *_gradients(whole)] for loss, whole in zip(losses, gradients.wholes, strict=True)]
                gradients.undo()
    except CannotStackError:
        raise
    except OF_CODE as error:
        if backends.is_out_of_memory(error):
            raise CannotStackError(
                "the memory is too small for a step of one of them and the others' weights"
            ) from error
        raise CannotStackError(_in_words(error)) from error
    if each and is_compiled and not compiled.why_not:
        notes.append(f"compile: forward and backward are one function; made in {compiled.seconds:.1f} s")
        size = replace(size, compiled=compiled)
    return replace(size, words="; ".join([size.words, *notes])), each


def _alone(member: Member, batch: Any) -> list[Tensor]:
    with world(member.generators, member.parts.device):
        return _loss_and_gradients(member.parts, batch)


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
    elif max(apart) > TOLERANCE and max(apart) > min(2 * max(_apart(alone, _nudged(member, batch))), MOST):
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


def _nudged(member: Member, batch: Any) -> list[Tensor]:
    weights, draw = [value.detach() for value in member.parts.model.parameters()], torch.Generator().manual_seed(0)
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.mul_(1 + NUDGE * torch.randn(weight.shape, generator=draw).to(weight))
    found = _alone(member, batch)
    for weight, value in zip(weights, before, strict=True):
        weight.copy_(value)
    return found


def _put_back(parts: Sequence[Any], before: Sequence[Sequence[Tensor]]) -> None:
    with torch.no_grad():
        for each, buffers in zip(parts, before, strict=True):
            for buffer, value in zip(each.model.buffers(), buffers, strict=True):
                buffer.copy_(value)


def _in_words(error: BaseException) -> str:
    said = str(error)
    usual = {
        "randomness error mode": "it draws random numbers by other means than dropout",
        ".item()": "what it does depends on values of tensors (.item())",
        "data-dependent control flow": "what it does depends on values of tensors (if, while)",
        "dynamic shape": "what it does depends on values of tensors (rows that a mask chooses)",
        "doesn't match the broadcast shape": "it writes into a tensor in place that is one for all of them",
        "inplace": "it writes into a tensor in place that is one for all of them",
        "performance drop": f"torch can't take {_operation(said)} for several models at once",
        "Batching rule not implemented": f"torch can't take {_operation(said)} for several models at once",
    }
    found = [words for sign, words in usual.items() if sign in said]
    return found[0] if found else f"{type(error).__name__}: {first_line(error)}"


def _operation(said: str) -> str:
    words = [word.strip("`'\".,;") for word in said.split() if "aten::" in word]
    return words[0] if words else "one of its operations"
