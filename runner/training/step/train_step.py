"""A group of batches on the device goes in; one optimizer step is taken, and its values come out as 0-d tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.data.loading.shard import Share
from runner.device.backends import Precision
from runner.device.placement import num_rows
from runner.tasks.metrics import named_values
from runner.tasks.task import Predicting, Task
from runner.training.optimizer import AveragedWeights
from runner.training.step.fused_update import Update, make_update

Step = Callable[[Sequence[Any]], Mapping[str, Tensor]]
Forward = Callable[[Any], Mapping[str, Tensor]]
Judge = Callable[[nn.Module, Any], Mapping[str, Tensor]]
Parted = Callable[[Sequence[Any]], Iterable[tuple[Any, float]]]


def make_step(
    model: nn.Module,
    task: Task,
    *,
    optimizer: Optimizer,
    precision: Precision,
    clip_grad_norm: float | None = None,
    average: AveragedWeights | None = None,
    around: Callable[[Step], Step] | None = None,
    update: Update | None = None,
    through: Callable[[Forward], Forward] | None = None,
    parted: Parted | None = None,
) -> Step:
    """The step of a run, every choice made here once: step(batches) -> {"loss": ..., ...}, detached, on the device.

    around: put around forward and backward of a group of batches (runner.training.step.split_batch.Pieces).
    update: what takes the optimizer's step, and leaves no gradients (None: runner.training.step.fused_update's). through: what the forward
    pass with its loss is put through, e.g. torch.compile.
    parted: what of a group of batches is learnt here, and how much each counts (None: all, by their rows).
    More than one batch accumulates gradients: each counts by its rows, so that the step equals one over all of them.
    With clipping, the values also hold `grad_norm`, the norm before it was clipped. Nothing here waits for the device.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scaler, update = precision.scaler, update or make_update(optimizer)
    is_in_parts = any(hasattr(parameter, "full_tensor") for parameter in parameters)  # of several processes

    def forward(batch: Any) -> Mapping[str, Tensor]:
        with precision.autocast():
            return task(model, batch)

    predict = through(forward) if through else forward

    def learn(batch: Any, share: float | None) -> Mapping[str, Tensor]:
        values = predict(batch)
        loss = next(iter(values.values()))
        if share is not None:
            loss = loss * share
        (scaler.scale(loss) if scaler else loss).backward()
        return values

    def move() -> Tensor | None:
        norm = None
        if clip_grad_norm is not None:
            if scaler:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
            if is_in_parts:
                norm = norm.full_tensor()  # type: ignore[attr-defined]  # a DTensor
        if scaler:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            update()
        if average:
            average.update()
        return norm

    def learn_all(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        if parted is not None:
            return _mean_over(parted(batches), learn)
        if len(batches) == 1:
            values = learn(batches[0], None).items()
            return {name: value.detach() if value.requires_grad else value for name, value in values}
        return _mean_over(_by_rows(batches), learn)

    whole = learn_all if around is None else around(learn_all)

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        values = whole(batches)
        norm = move()
        return values if norm is None else {**values, "grad_norm": norm}

    return step


def _by_rows(batches: Sequence[Any]) -> Iterator[tuple[Any, float]]:
    rows = [num_rows(batch) for batch in batches]
    for batch, count in zip(batches, rows, strict=True):
        yield batch, count / sum(rows)


def _mean_over(
    parts: Iterable[tuple[Any, float]], learn: Callable[[Any, float | None], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    means: dict[str, Tensor] = {}
    for batch, share in parts:
        for name, value in learn(batch, share).items():
            part = value.detach() * share
            means[name] = means[name] + part if name in means else part
    return means


def make_judge(task: Task, *, precision: Precision) -> Judge:
    """What evaluate() does with a batch: judge(model, batch) -> the task's values; a task's metrics take it in, too."""
    metrics: Mapping[str, Any] = getattr(task, "metrics", None) or {}
    if not metrics or not isinstance(task, Predicting):

        def judge(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
            with precision.autocast():
                return task(model, batch)

        return judge

    def judge_and_gather(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        with precision.autocast():
            outputs = task.outputs(model, batch)
            values = task.judge(outputs, batch)
        predictions, targets = task.predictions(outputs), task.targets(batch)
        for metric in metrics.values():
            metric.update(predictions, targets)
        return values

    return judge_and_gather


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    batches: Iterable[Any],
    *,
    precision: Precision,
    judge: Judge | None = None,
    labels: Sequence[str] = (),
    total: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """The task's values over a whole split, each row counting the same, its metrics, and what is derived from them.

    judge: what make_judge() made, with a guard on it. labels: of classes or targets, for metrics with a value for each.
    total: the sum over all processes, where the batches are Shares; each gets the values of the whole split.
    Waits for the device once, at the end; a metric that sorts (auroc) waits some times more there.
    Raises: RunnerError for a metric that gives no number.
    """
    judge = judge or make_judge(task, precision=precision)
    metrics: Mapping[str, Any] = getattr(task, "metrics", None) or {}
    modules = [part for part in (model, task) if isinstance(part, nn.Module)]
    was_training = [module.training for module in modules]
    names: tuple[str, ...] = ()
    sums, count = torch.zeros(()), 0
    for metric in metrics.values():  # an evaluation before may have been broken off
        metric.reset()
    try:
        for module in modules:
            module.eval()
        for item in batches:
            batch, rows, of = _counted(item)
            values = judge(model, batch)
            part = torch.stack([value.float() for value in values.values()]) * rows  # (k,)
            sums = sums + part if names else part
            names = tuple(values)
            count += of
        sums = sums if total is None else total(sums)
        gathered = _computed(metrics, labels)
    finally:
        for module, before in zip(modules, was_training, strict=True):
            module.train(before)
        for metric in metrics.values():
            metric.reset()
    more = [torch.as_tensor(value, dtype=torch.float32, device=sums.device) for value in gathered.values()]
    numbers = torch.cat([sums / count, torch.stack(more)]) if more else sums / count
    found = dict(zip((*names, *gathered), numbers.tolist(), strict=True))
    derived: Mapping[str, float] = getattr(task, "derived", dict)(found)
    return {**found, **derived}


def _counted(item: Any) -> tuple[Any, int, int]:
    """A batch, its rows that count, and those of all processes."""
    if isinstance(item, Share):
        return item.batch, item.rows.num, item.rows.of
    rows = num_rows(item)
    return item, rows, rows


def _computed(metrics: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Each number that the metrics came to, on the device, by its name."""
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        found |= named_values(name, metric.compute(), labels=labels)
    return found
