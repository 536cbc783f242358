"""Finds out, before the first step, whether members can take their steps together, how many at a time, or why not.

Called by experiment/together.py. It takes forward and backward of the first batch, and leaves all as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device import backends
from runner.errors import first_line
from runner.training.optimizer import Turns
from runner.training.stacked.fit import Member, stacked_batches, world
from runner.training.stacked.size import Size, choose_size
from runner.training.stacked.stack import CannotStackError, Stack
from runner.training.stacked.step import Members, StackedStep
from runner.training.stacked.update import check_optimizer

#: members whose first step is compared with their own alone
MOST_COMPARED = 4
#: what a job of its own costs beside its training: its process, its pictures
START_SECONDS = 3.0
#: of the time of its steps, what is to be gained for each job
LEAST_GAIN = 0.05
#: relative: rounding is 1e-6, another mask or a weight's other value are 1e-2
TOLERANCE = 1e-3


def check_alike(members: Sequence[Member], *, is_asked: bool) -> Size:
    """Takes forward and backward of the first batch together, and of some members alone: both must come to the same.
    Then measures how many of them to take together.

    Leaves weights, buffers and generators as they were. is_asked: also where nothing is gained by it.
    Raises: CannotStackError with the reason.
    """
    for member in members:
        _check_parts(member)
    parts = [member.parts for member in members]
    shapes = {(each.train.num_rows, each.train.batch_size) for each in parts}
    if len(shapes) > 1:
        raise CannotStackError("their training splits have different numbers of rows")
    batches = [next(iter(each.train.epoch(0))) for each in parts]
    before = [[buffer.clone() for buffer in each.model.buffers()] for each in parts]
    for each in parts:
        each.model.train()
    stack = Stack(parts)
    together, size = _together(stack, members, batches)
    _put_back(parts, before)
    compared = sorted({0, len(parts) - 1, *range(0, len(parts), -(-len(parts) // MOST_COMPARED))})
    for number in compared:
        alone = _alone(members[number], batches[number])
        _put_back(parts, before)
        _compare(alone, [value[number] for value in together], whole=len(parts))
    gained = (size.seconds_alone - size.seconds) * parts[0].limits.num_steps + START_SECONDS
    if not is_asked and gained < LEAST_GAIN * size.seconds_alone * parts[0].limits.num_steps:
        raise CannotStackError(f"that gains nothing: {size.words}")
    return size


def _check_parts(member: Member) -> None:
    """What needs no step to be known."""
    parts, train = member.parts, member.settings.train
    for reason, holds in {
        "optimizer.turns has several optimizers": isinstance(parts.optimizer, Turns),
        "several processes": parts.shards is not None,
        "placement.map": bool(parts.elsewhere),
        "train.precision=fp16 scales each loss by itself": parts.precision.scaler is not None,
        "train.recompute takes each model's forward pass twice": bool(train.recompute),
        "train.compile=true": train.compile,
        "train.cuda_graph=true": train.cuda_graph,
        "train.profile traces one run's steps": train.profile is not None,
        "its rows are streamed": parts.train.indexed() is None,
    }.items():
        if holds:
            raise CannotStackError(reason)
    check_optimizer(parts.optimizer)


def _together(stack: Stack, members: Sequence[Member], batches: Sequence[Any]) -> tuple[list[Tensor], Size]:
    """The losses (M,) and the gradients (M, ...) of the first batch, and the size to take. Raises: CannotStackError."""
    groups = [Members([member.parts], member.settings.train) for member in members]
    states = [dict(member.generators) for member in members]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # it would loop over the members
            step = StackedStep(stack, groups, num_pieces=1, say=lambda text: None)
            with world(members[0].generators, members[0].parts.device), step.drawing(states) as drawn:
                group, before = [stacked_batches(batches)], drawn()
                loss = next(iter(step.forward_backward(group).values()))
                gradients = [value.grad for value in stack.parameters.values() if value.grad is not None]
                step.undo(before)
                size = choose_size(step, group, drawn=drawn)
    except CannotStackError:
        raise
    except Exception as error:
        if backends.is_out_of_memory(error):
            raise CannotStackError("the memory does not take one step of all of them") from error
        raise CannotStackError(_in_words(error)) from error
    return [loss, *gradients], size


def _alone(member: Member, batch: Any) -> list[Tensor]:
    """The same of one, as its own run would take it."""
    parts = member.parts
    with world(member.generators, parts.device):
        with parts.precision.autocast():
            values = parts.task(parts.model, batch)
        loss = next(iter(values.values()))
        loss.backward()
    found = [loss.detach()]
    for parameter in parts.model.parameters():
        if parameter.grad is not None:
            found.append(parameter.grad)
            parameter.grad = None
    return found


def _compare(alone: Sequence[Tensor], together: Sequence[Tensor], *, whole: int) -> None:
    if len(alone) != len(together):
        raise CannotStackError("together, other weights get gradients than in a run alone")
    for index, (own, other) in enumerate(zip(alone, together, strict=True)):
        size = max(float(own.norm()), 1e-3 * max(float(each.norm()) for each in alone[1:] or alone))
        distance = float((own - other.detach()).norm())
        if not distance <= TOLERANCE * size + 1e-7:
            what = "its loss is" if index == 0 else "its gradients are"
            raise CannotStackError(f"of {whole} together, {what} another than alone: what it computes depends on more")


def _put_back(parts: Sequence[Any], before: Sequence[Sequence[Tensor]]) -> None:
    with torch.no_grad():
        for each, buffers in zip(parts, before, strict=True):
            for buffer, value in zip(each.model.buffers(), buffers, strict=True):
                buffer.copy_(value)


def _in_words(error: Exception) -> str:
    """What stands in the way, as a person reads it; torch's own first line where it is none of the usual."""
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
