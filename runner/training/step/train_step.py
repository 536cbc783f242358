"""Makes the training step: forward, loss, backward, clipping and update over a group of batches on the device.

It returns the step's values as 0-d tensors and waits for nothing. choose.py decides what stands around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.device.placement import num_rows
from runner.device.precision import Precision
from runner.tasks.task import Task
from runner.training.metric_buffer import in_order
from runner.training.optimizer import AveragedWeights, NoAverage, Turns
from runner.training.step.fused_update import FixedUpdate, make_update

Step = Callable[[Sequence[Any]], Mapping[str, Tensor]]
Forward = Callable[[Any], Mapping[str, Tensor]]
OwnBatches = Callable[[Sequence[Any]], Iterable[tuple[Any, Any]]]
Clocked = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class StepOptions:
    """What stands around a step, of a run that asks for more than forward, backward, update (None: nothing)."""

    #: around forward and backward of a group of batches: split_batch.SplitBatch.wrap
    wrap_forward_backward: Callable[[Step], Step] | None = None
    #: what the forward pass with its loss is put through: torch.compile
    compile_forward: Callable[[Forward], Forward] | None = None
    #: what takes the optimizer's step and leaves no gradients, in its place
    update: FixedUpdate | None = None
    #: what of a group of batches is learnt in this process, and how much each counts, in the place of all by their rows, say
    own_batches: OwnBatches | None = None
    #: whether the model has parameters of other optimizers, which this one's loss leaves without a gradient
    is_a_turn: bool = False
    #: clocks a part of the step, see clock.StepClock.part
    clocked: Clocked | None = None


def make_step(
    model: nn.Module,
    task: Task,
    *,
    optimizer: Optimizer,
    precision: Precision,
    clip_grad_norm: float | None = None,
    average: AveragedWeights | None = None,
    options: StepOptions = StepOptions(),
) -> Step:
    """The step of a run, every choice made here once: step(batches) -> {"loss": ..., ...}, detached, on the device.

    More than one batch accumulates gradients: each counts by its rows, or by what task.num_counted(batch) says, where the
    task has it, so that the step equals one over all of them.
    With clipping, the values also hold `grad_norm`, the norm before it was clipped. Nothing here waits for the device.
    Of optimizers that take turns each takes a step of its own, see take_turns().
    """
    if isinstance(optimizer, Turns):
        make = partial(make_step, model, precision=precision, clip_grad_norm=clip_grad_norm)
        options = replace(options, is_a_turn=True)
        steps = {
            name: make(in_turn(task, name), optimizer=one, options=options) for name, one in optimizer.each.items()
        }
        return take_turns(optimizer, steps, average=average)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scaler, averages = precision.scaler, average or NoAverage()
    target: Any = options.update or optimizer
    update = _scaled_update(optimizer, scaler, target) if scaler.is_enabled() else None
    update = update or (options.update.update if options.update else make_update(optimizer))
    inputs = parameters if options.is_a_turn else None  # None: of all that takes part in the loss
    num_counted: Callable[[Any], Tensor] | None = getattr(task, "num_counted", None)
    is_in_parts = any(hasattr(parameter, "full_tensor") for parameter in parameters)  # of several processes

    def forward(batch: Any) -> Mapping[str, Tensor]:
        with precision.autocast():
            return task(model, batch)

    predict = options.compile_forward(forward) if options.compile_forward else forward
    if options.clocked:
        predict = options.clocked("forward", predict)

    def forward_backward(batch: Any, share: Any) -> Mapping[str, Tensor]:
        values = predict(batch)
        loss = next(iter(values.values()))
        if share is not None:
            loss = loss * share
        loss = scaler.scale(loss)
        if inputs is None:  # not backward(inputs=None): torch.compile takes that for an empty list (2.13)
            loss.backward()
        else:
            loss.backward(inputs=inputs)
        return values

    def clip() -> Tensor | None:
        if clip_grad_norm is None:
            return None
        scaler.unscale_(target)
        norm = nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        return norm.full_tensor() if is_in_parts else norm  # type: ignore[attr-defined]  # a DTensor

    def apply_update() -> Tensor | None:
        norm = clip()
        update()
        averages.update()
        return norm

    def accumulate(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        if options.own_batches is not None:
            return _mean_over(options.own_batches(batches), forward_backward)
        if len(batches) == 1:
            values = forward_backward(batches[0], None).items()
            return {name: value.detach() if value.requires_grad else value for name, value in values}
        return _mean_over(_shares(batches, num_counted), forward_backward)

    compute_gradients: Step = accumulate
    if options.wrap_forward_backward:
        compute_gradients = options.wrap_forward_backward(compute_gradients)
    if options.clocked:
        compute_gradients = options.clocked("backward", compute_gradients)
        apply_update = options.clocked("update", apply_update)

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        values = compute_gradients(batches)
        norm = apply_update()
        if norm is None:
            return values
        loss = next(iter(values.values()))
        return {**values, "grad_norm": norm.to(loss.device)}  # it is made where the first weights lie

    return step


def _scaled_update(optimizer: Optimizer, scaler: Any, target: Any) -> Callable[[], None]:
    def update() -> None:
        scaler.step(target)
        scaler.update()
        optimizer.zero_grad()

    return update


def in_turn(task: Any, name: str) -> Task:
    """A task as one of the optimizers that take turns has it."""
    return partial(task, turn=name)


def take_turns(optimizer: Turns, steps: Mapping[str, Step], *, average: AveragedWeights | None) -> Step:
    """The step of several optimizers: that of each which is due, in their order, on the same batches.

    Its values are those of all, NAME_TURN, and first `loss`, the sum of their losses; of a turn that was not due, the last.
    """
    averages = average or NoAverage()

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        for name, take in steps.items():
            if optimizer.is_due(name):
                optimizer.values[name] = take(batches)
        optimizer.step()
        averages.update()
        losses = [next(iter(values.values())) for values in optimizer.values.values()]
        found = {f"{key}_{name}": value for name in steps for key, value in optimizer.values[name].items()}
        return {"loss": torch.stack(losses).sum(), **found}

    return step


def _shares(
    batches: Sequence[Any], num_counted: Callable[[Any], Tensor] | None
) -> Iterator[tuple[Any, float | Tensor]]:
    if num_counted is None:
        rows = [num_rows(batch) for batch in batches]
        for batch, count in zip(batches, rows, strict=True):
            yield batch, count / sum(rows)
        return
    counted = torch.stack([num_counted(batch) for batch in batches])
    shares = counted / counted.sum().clamp(min=1)  # of a step in which nothing counts 0 each
    yield from zip(batches, shares.unbind(), strict=True)


def _mean_over(
    parts: Iterable[tuple[Any, Any]], forward_backward: Callable[[Any, Any], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Raises: RunnerError where a part has values of other names than the first."""
    means: dict[str, Tensor] = {}
    for batch, share in parts:
        found = forward_backward(batch, share)
        for name, value in in_order(found, tuple(means or found), of="a batch of a step").items():
            part = value.detach() * share
            means[name] = means[name] + part if name in means else part
    return means
