"""Evaluates a split: one number for each of the task's values and metrics, read from the device once.

fit.py uses Evaluation after epochs and for the test; runs/evaluate.py calls evaluate().
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.loading.batches import Shard, Share
from runner.device import backends
from runner.device.placement import num_rows
from runner.device.precision import Precision, at_least_float32
from runner.distributed.group import Ranks
from runner.inspection.guard import Guard
from runner.tasks.metrics import named_values
from runner.tasks.task import Task, is_predicting
from runner.training.carried_state import evaluating, reset_state, restored
from runner.training.metric_buffer import in_order
from runner.training.parts import Parts
from runner.training.signals import Stop, StoppedError

EvalStep = Callable[[nn.Module, Any], Mapping[str, Tensor]]


def make_eval_step(task: Task, *, precision: Precision) -> EvalStep:
    """Make a function (model, batch) -> the task's values, which also updates the task's metrics."""
    metrics: Mapping[str, Any] = getattr(task, "metrics", None) or {}

    def eval_step(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        with precision.autocast():
            if not metrics or not is_predicting(task):
                return task(model, batch)
            outputs = task.outputs(model, batch)
            values = task.judge(outputs, batch)
        predictions, targets = task.predictions(outputs), task.targets(batch)
        for metric in metrics.values():
            metric.update(predictions.detach(), targets)
        return values

    return eval_step


def evaluate(
    model: nn.Module,
    task: Task,
    batches: Iterable[Any],
    *,
    precision: Precision,
    eval_step: EvalStep | None = None,
    labels: Sequence[str] = (),
    total: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """The task's values over a whole split, its metrics, and values derived from them.

    Every example counts the same, unless the task has num_counted(batch), e.g., the tokens of a language model. Gradients are
    disabled, unless the task has needs_grad. Waits for the device once, at the end; a metric that sorts (auroc) waits several
    times more there.

    Args:
        eval_step: From make_eval_step(), with a guard on it.
        labels: Of classes or targets, for metrics with one value for each.
        total: The sum over all processes, if the batches are Shares; each process gets the values of the whole split.

    Raises:
        RunnerError: For a metric whose value is not a number.
    """
    eval_step = eval_step or make_eval_step(task, precision=precision)
    metrics: Mapping[str, Any] = getattr(task, "metrics", None) or {}
    num_counted: Callable[[Any], Tensor] | None = getattr(task, "num_counted", None)
    names: tuple[str, ...] = ()
    sums, count = torch.zeros(()), 0
    for metric in metrics.values():  # an earlier evaluation may have been interrupted
        metric.reset()
    try:
        with evaluating(model, task), torch.set_grad_enabled(getattr(task, "needs_grad", False)):
            for item in batches:
                batch, rows, of = _counted(item)
                values: Mapping[str, Tensor] = {name: value.detach() for name, value in eval_step(model, batch).items()}
                values = in_order(values, names or tuple(values), of="a batch")
                part = torch.stack([at_least_float32(value) for value in values.values()])  # (k,)
                if num_counted is None:
                    part = part * rows
                else:
                    counted = num_counted(batch).to(part.dtype) * bool(rows)  # 0 for another process's row
                    part = torch.cat([part * counted, counted.reshape(1)])
                sums = sums + part if names else part
                names = tuple(values)
                count += of
        sums = sums if total is None else total(sums)
        means = sums / count if num_counted is None else sums[:-1] / sums[-1].clamp(min=1)
        gathered: dict[str, Any] = {}
        for name, metric in metrics.items():
            gathered |= named_values(name, metric.compute(), labels=labels)
    finally:
        for metric in metrics.values():
            metric.reset()
    more = [torch.as_tensor(value, dtype=sums.dtype, device=sums.device) for value in gathered.values()]
    numbers = torch.cat([means, torch.stack(more)]) if more else means
    results = dict(zip((*names, *gathered), numbers.tolist(), strict=True))
    derived: Mapping[str, float] = getattr(task, "derived", dict)(results)
    return {**results, **derived}


def _counted(item: Any) -> tuple[Any, int, int]:
    if isinstance(item, Share):
        return item.batch, item.rows.num, item.rows.of
    rows = num_rows(item)
    return item, rows, rows


class Evaluation:
    """Evaluates the run's splits, shared by all processes. A signal interrupts it."""

    def __init__(self, parts: Parts, guard: Guard, *, stop: Stop, ranks: Ranks) -> None:
        self.seconds = 0.0  # in total
        self.times = 0  # number of validations
        self._parts, self._stop, self._ranks = parts, stop, ranks
        eval_step = make_eval_step(parts.task, precision=parts.precision)
        if parts.shards is not None:
            eval_step = parts.shards.within(eval_step)
        self._eval_steps = {split: guard.on(eval_step) for split in ("val", "test")}

    def measure(self, split: str) -> dict[str, float]:
        """The values of a whole split by their full names; {} if there is no such split.

        Raises:
            StoppedError: After a signal. A resumed run evaluates from the beginning.
        """
        parts = self._parts
        loader = parts.val if split == "val" else parts.test
        if loader is None:
            return {}
        began, generators = time.perf_counter(), backends.generator_states(parts.device)
        try:
            shared = self._share()
            with self._own_state():
                values = evaluate(
                    parts.kept_model,
                    parts.task,
                    self._until_stopped(loader.epoch(0, shard=shared)),
                    precision=parts.precision,
                    eval_step=self._eval_steps[split],
                    labels=parts.source.classes or parts.source.targets,
                    total=self._ranks.total if shared else None,
                )
        except StoppedError:
            backends.set_generator_states(generators, parts.device)
            raise
        finally:
            if parts.shards is not None:
                parts.shards.let_go()
        self.seconds += time.perf_counter() - began
        self.times += split == "val"
        return {f"{split}/{name}": value for name, value in values.items()}

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """Begin with a copy of the training's state, or with reset_state(), and restore the training's state afterwards."""
        parts, model = self._parts, self._parts.kept_model
        with restored(model, parts.task):
            if model is not parts.model:
                parts.carried.load_state(parts.carried.state(), model)
            reset_state(model, parts.task)
            yield

    def _share(self) -> Shard | None:
        """Which rows of a split this process evaluates; None: all, also with metrics, which can't be combined."""
        if self._ranks.num == 1:
            return None
        models = [self._parts.model, self._parts.kept_model]
        # running statistics differ, as each process trains on other rows
        self._ranks.broadcast_([buffer for model in models for buffer in model.buffers()])
        return None if getattr(self._parts.task, "metrics", None) else Shard(self._ranks.rank, self._ranks.num)

    def _until_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        is_cut = False
        for batch in batches:
            is_cut = self._stop.signal is not None
            if self._parts.shards is not None:  # each batch needs all processes
                is_cut = self._in_any_process(is_cut)
            if is_cut:
                break
            yield batch
        if self._in_any_process(is_cut):
            raise StoppedError

    def _in_any_process(self, is_so: bool) -> bool:
        return bool(self._ranks.all_reduce_max([float(is_so)])[0])
