"""Chooses how a run takes its steps: eager, compiled, as CUDA graphs, split, by several processes, with the guard.

fit.py calls it once, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from runner.config.settings import Settings
from runner.data.loading.batches import Shard
from runner.data.loading.loaders import Batches
from runner.device.layers import overruns
from runner.distributed.gradients import ShardedGradients, SharedGradients
from runner.distributed.group import Ranks
from runner.inspection.guard import Watching
from runner.training.loop import Epochs, Progress
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import Turns
from runner.training.parts import Parts
from runner.training.schedule import Rates
from runner.training.step.clock import STEP, ClockedEpochs, StepClock
from runner.training.step.compiled import CompiledSteps, make_compiled
from runner.training.step.cuda_graphs import GraphSteps, cuda_graphs
from runner.training.step.on_device import Compiling, OnDevice, Repeater
from runner.training.step.split_batch import SplitBatch
from runner.training.step.train_step import EagerSteps, Step, StepOptions, make_step

#: batches per epoch, below which a smaller last one is worth compiling
FEW_BATCHES = 20


class Watchers(NamedTuple):
    """What watches the steps: the guard, a clock that times some of them (None: no clock), and what prints the choice."""

    guard: Watching
    clock: StepClock | None
    say: Callable[[str], None]


def choose_steps(
    parts: Parts, settings: Settings, *, progress: Progress, buffer: MetricBuffer, ranks: Ranks, watchers: Watchers
) -> Epochs:
    guard, clock, say = watchers
    train = settings.train
    split = SplitBatch(parts, progress, say=say) if train.on_oom == "split" else None
    several = _of_several(parts, settings, num=ranks.num)
    task = several.task if several else parts.task
    shard = Shard(ranks.rank, ranks.num) if several else None

    def make(**options: Any) -> Step:
        return make_step(
            parts.model,
            task,
            optimizer=parts.optimizer,
            precision=parts.precision,
            clip_grad_norm=train.clip_grad_norm,
            average=parts.average,
            options=StepOptions(
                wrap_forward_backward=split.wrap if split else None,
                own_batches=several.own_batches if several else None,
                **options,
            ),
        )

    kind = how_to_compile(parts, is_alone=several is None)
    repeater = None if several else _repeater(parts, settings, kind, say=say)
    step = first = guard.on(make(), of_groups=True)
    if train.compile:
        is_first = progress.step == 0 and repeater is None  # a Repeater's first step is eager
        step = make_compiled(make, optimizer=parts.optimizer, is_first=is_first, kind=kind, say=say)
        step = step if repeater else guard.on(step, of_groups=True)
    rates = Rates(parts.optimizer, parts.schedule, buffer=buffer, progress=progress)
    one_by_one = EagerSteps(
        step, parts.train, accumulate_steps=train.accumulate_steps, rates=rates, buffer=buffer, shard=shard
    )
    epochs: Epochs = one_by_one
    if repeater is not None:
        compiling = kind if train.compile else None
        epochs = OnDevice(make, first, one_by_one, repeater=repeater, limits=parts.limits, kind=compiling)
    if clock is None:
        return epochs
    is_whole = train.compile or settings.placement.guard == "always"
    clocked = clock.part(STEP, step) if is_whole else make(clocked=clock.part)
    return ClockedEpochs(epochs, clock, progress=progress, one_by_one=one_by_one, clocked=clocked)


def _repeater(parts: Parts, settings: Settings, kind: Compiling, *, say: Callable[[str], None]) -> Repeater | None:
    train = settings.train
    compiled = CompiledSteps(say=say, options=kind.options) if train.compile else None
    if train.cuda_graph:
        return GraphSteps(cuda_graphs(), compiled=compiled, replaced=parts.carried.replaced)
    is_on_cpu = parts.device.type == "cpu" and parts.train.indexed() is not None
    return compiled if is_on_cpu and train.on_oom != "split" and not kind.in_part else None


def _of_several(parts: Parts, settings: Settings, *, num: int) -> SharedGradients | ShardedGradients | None:
    if num == 1:
        return None
    if parts.shards is not None:
        return ShardedGradients(parts.shards, parts.task, num=num)
    return SharedGradients(parts.model, parts.task, num=num, unused_parameters=settings.placement.unused_parameters)


def how_to_compile(parts: Parts, *, is_alone: bool) -> Compiling:
    in_part = "" if is_alone else "processes exchange gradients in the middle of the step"
    if isinstance(parts.optimizer, Turns):
        in_part = "several optimizers take turns"
    elif parts.precision.scaler.is_enabled():
        in_part = "a compiled update knows no scale of gradients"
    return Compiling(
        fixed_shapes=not isinstance(parts.splits.train, Dataset),
        usual_rows=_usual_rows(parts.train) if is_alone else None,
        in_part=in_part,
        keeps_layout=parts.device.type == "cpu" and bool(overruns(parts.model)),
    )


def _usual_rows(batches: Batches) -> int | None:
    is_rare = batches.num_rows % batches.batch_size != 0 and batches.num_batches >= FEW_BATCHES
    return batches.batch_size if is_rare else None
