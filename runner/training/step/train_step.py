"""Makes the training step (forward, loss, backward, clipping and update over a group of batches), and takes it.

A step returns its values as 0-d tensors and waits for nothing. choose.py decides what wraps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.data.loading.batches import Shard
from runner.device.placement import num_rows
from runner.device.precision import Precision, SkippingScaler
from runner.tasks.checks import shares_tensors
from runner.tasks.task import Task
from runner.training.metric_buffer import MetricBuffer, SharedRows, in_order
from runner.training.optimizer import AveragedWeights, NoAverage, Turns, wants_closure
from runner.training.step.fused_update import FixedUpdate, make_update

Step = Callable[[Sequence[Any]], Mapping[str, Tensor]]
Forward = Callable[[Any], Mapping[str, Tensor]]
ForwardBackward = Callable[[Any, Any], Mapping[str, Tensor]]  # of a batch, and its share of the step
OwnBatches = Callable[[Sequence[Any]], Iterable[tuple[Any, Any]]]
Clocked = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class StepOptions:
    """What changes or wraps the parts of a step."""

    wrap_forward_backward: Callable[[Step], Step] | None = None  # of a group of batches: SplitBatch.wrap
    compile_forward: Callable[[Forward], Forward] | None = None  # with the loss: torch.compile
    update: FixedUpdate | None = None  # takes the step and clears the gradients, instead of the optimizer
    own_batches: OwnBatches | None = None  # which of a group this process trains on, and how much each counts
    is_a_turn: bool = False  # other optimizers' parameters get no gradients of this one's loss
    clocked: Clocked | None = None  # times a part of the step: StepClock.part


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
    """Make the step of a run: step(batches) -> {"loss": ..., ...}, detached, on the device. Nothing waits for the device.

    Several batches accumulate gradients. Each counts by its examples, or by task.num_counted(batch) if the task has it, so
    the step equals one over all of them. With clipping, the values also have `grad_norm`, the norm before clipping.
    An optimizer with a closure computes the loss several times in a step; the values are of the first, and it may read the device.
    Of several optimizers each that is due takes its step, in order, on the same batches. The values are `loss`, the sum of
    all losses, and NAME_TURN for each optimizer; the last values of one that is not due.
    """
    averages = average or NoAverage()
    if isinstance(optimizer, Turns):
        make = partial(make_step, model, precision=precision, clip_grad_norm=clip_grad_norm)
        own = replace(options, is_a_turn=True)
        each = optimizer.each.items()
        steps = {name: make(_in_turn(task, name, optimizer), optimizer=one, options=own) for name, one in each}
        return _take_turns(optimizer, steps, averages=averages)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_in_parts = any(hasattr(parameter, "full_tensor") for parameter in parameters)  # across processes
    num_counted, own_batches = getattr(task, "num_counted", None), options.own_batches
    scaler: Any = precision.scaler
    inputs = parameters if options.is_a_turn else None  # what gets gradients; None: all that the loss depends on
    clocked: Clocked = options.clocked or (lambda name, call: call)

    def forward(batch: Any) -> Mapping[str, Tensor]:
        with precision.autocast():
            return task(model, batch)

    predict = clocked("forward", options.compile_forward(forward) if options.compile_forward else forward)

    def forward_backward(batch: Any, share: Any) -> Mapping[str, Tensor]:
        values: Mapping[str, Tensor] = predict(batch)
        loss = next(iter(values.values()))
        loss = scaler.scale(loss if share is None else loss * share)
        if inputs is None:  # backward(inputs=None) would be an empty list for torch.compile (2.13)
            loss.backward()
        else:
            loss.backward(inputs=inputs)
        return values

    def accumulate(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        if own_batches is not None:
            return mean_over(own_batches(batches), forward_backward)
        if len(batches) == 1:
            values = forward_backward(batches[0], None).items()
            return {name: value.detach() if value.requires_grad else value for name, value in values}
        return mean_over(shares(batches, num_counted), forward_backward)

    wrap = options.wrap_forward_backward
    compute_gradients: Step = clocked("backward", wrap(accumulate) if wrap else accumulate)

    def clip() -> Tensor | None:
        if clip_grad_norm is None:
            return None
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        return norm.full_tensor() if is_in_parts else norm  # type: ignore[attr-defined]  # a DTensor

    if wants_closure(optimizer):
        return _make_step_with_closure(optimizer, compute_gradients, clip, averages)

    def scaled_update() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    update = options.update.update if options.update else make_update(optimizer)
    update = scaled_update if scaler.is_enabled() else update

    def clip_and_update() -> Tensor | None:
        norm = clip()
        update()
        averages.update()
        return norm

    apply_update = clocked("update", clip_and_update)

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        values = compute_gradients(batches)
        return _with_norm(values, apply_update())

    return _that_skips(step, scaler, model) if isinstance(scaler, SkippingScaler) else step


def _that_skips(step: Step, scaler: SkippingScaler, model: nn.Module) -> Step:
    """Report which steps were skipped, as `skipped`: 0 or 1; their forward pass does not change running statistics either."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]

    def skipping(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        before = [buffer.clone() for buffer in buffers]
        values = step(batches)
        assert scaler.last is not None
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(torch.where(scaler.last > 0, old, buffer))
        return {**values, "skipped": scaler.last}

    return skipping


def _make_step_with_closure(
    optimizer: Optimizer,
    compute_gradients: Step,
    clip: Callable[[], Tensor | None],
    averages: AveragedWeights | NoAverage,
) -> Step:
    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        first: Mapping[str, Tensor] = {}

        def closure() -> Tensor:
            nonlocal first
            optimizer.zero_grad()
            values = compute_gradients(batches)
            norm = clip()
            first = first or _with_norm(values, norm)
            return next(iter(values.values()))

        optimizer.step(closure)  # type: ignore[arg-type]  # it returns a tensor, as in torch's documentation
        optimizer.zero_grad()
        averages.update()
        return first

    return step


def _with_norm(values: Mapping[str, Tensor], norm: Tensor | None) -> Mapping[str, Tensor]:
    if norm is None:
        return values
    loss = next(iter(values.values()))
    return {**values, "grad_norm": norm.to(loss.device)}  # it is made on the first weight's device


def _in_turn(task: Any, name: str, optimizer: Turns) -> Task:
    if not shares_tensors(task):
        return partial(task, turn=name)
    return lambda model, batch: task(model, batch, turn=name, shared=optimizer.shared.setdefault(id(batch), {}))


def _take_turns(optimizer: Turns, steps: Mapping[str, Step], *, averages: AveragedWeights | NoAverage) -> Step:
    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        for name, take in steps.items():
            if optimizer.is_due(name):
                optimizer.values[name] = take(batches)
        optimizer.shared.clear()
        optimizer.step()
        averages.update()
        losses = [next(iter(values.values())) for values in optimizer.values.values()]
        each = {f"{key}_{name}": value for name in steps for key, value in optimizer.values[name].items()}
        return {"loss": torch.stack(losses).sum(), **each}

    return step


def shares(
    batches: Sequence[Any], num_counted: Callable[[Any], Tensor] | None, *, count_rows: Callable[[Any], int] = num_rows
) -> Iterator[tuple[Any, float | Tensor]]:
    """Yield each batch with its share of the step: of the examples, or of what num_counted() counts, () or (M,)."""
    if num_counted is None:
        rows = list(map(count_rows, batches))
        yield from zip(batches, [count / sum(rows) for count in rows], strict=True)
        return
    counted = torch.stack(list(map(num_counted, batches)))
    yield from zip(batches, (counted / counted.sum(0).clamp(min=1)).unbind(), strict=True)  # all 0 if nothing counts


def mean_over(parts: Iterable[tuple[Any, Any]], forward_backward: ForwardBackward) -> dict[str, Tensor]:
    """The mean of the values of (batch, share) pairs."""
    means: dict[str, Tensor] = {}
    for batch, share in parts:
        values = forward_backward(batch, share)
        for name, value in in_order(values, tuple(means or values), of="a batch of a step").items():
            part = value.detach() * share
            means[name] = means[name] + part if name in means else part
    return means


class InOrder(Protocol):
    """Batches of a training split, epoch by epoch."""

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]: ...


class StepRates(Protocol):
    """Learning rates: schedule.Rates, or those of a group."""

    def note(self) -> None:
        """Note the rates of the next step."""

    def advance(self) -> None:
        """Advance the schedule after a step."""


class EagerSteps:
    """Takes each step by a call from the host. `step` takes one; clock.py replaces it for the steps that it times.

    shard: One of several processes, which gets its rows of each batch; None for whole batches.
    """

    def __init__(
        self,
        step: Step,
        batches: InOrder,
        *,
        accumulate_steps: int,
        rates: StepRates,
        buffer: MetricBuffer | SharedRows,
        shard: Shard | None = None,
    ) -> None:
        self.step, self.batches, self.accumulate_steps, self.rates = step, batches, accumulate_steps, rates
        self._buffer, self._shard = buffer, shard

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        first_batch = first_step * self.accumulate_steps
        batches = iter(self.batches.epoch(number, first_batch=first_batch, shard=self._shard))
        while group := tuple(islice(batches, self.accumulate_steps)):
            self.rates.note()
            self._buffer.write(self.step(group))
            self.rates.advance()
            yield 1
