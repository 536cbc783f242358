"""A run's configuration goes in; the most memory that its real steps take on this CPU comes out, by torch's own allocator."""

from __future__ import annotations

from itertools import islice

import torch
from torch.profiler import ProfilerActivity, profile

from runner.device.placement import tensors
from runner.experiment.build import prepare
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.training.step.train_step import make_step


def storages(trees):
    found = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for tree in trees for leaf in tensors(tree)}
    return sum(found.values())


def measure(cfg):
    parts = prepare(cfg, torch.device("cpu"))
    group = tuple(islice(parts.train.epoch(0), cfg.train.accumulate_steps))
    buffer = MetricBuffer(parts.device, lambda window: None, background=Background(), pull_every=cfg.metrics.pull_every)
    step = make_step(
        parts.model,
        parts.task,
        optimizer=parts.optimizer,
        precision=parts.precision,
        clip_grad_norm=cfg.train.clip_grad_norm,
        average=parts.average,
    )
    parts.model.train()
    for _ in range(2):
        buffer.write(step(group))
    kept = [list(parts.model.state_dict().values()), [dict(state) for state in parts.optimizer.state.values()]]
    kept += [list(parts.average.model.state_dict().values())] if parts.average else []
    held = storages([*kept, group, buffer._ring])
    held += sum(each.device_bytes for each in (parts.train, parts.val, parts.test) if each is not None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        buffer.write(step(group))
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    highest = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return held + highest
