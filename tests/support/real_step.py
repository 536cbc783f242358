"""A real step on the CPU, with which plans of the same step are compared."""

from __future__ import annotations

from itertools import islice

import torch
from torch.profiler import ProfilerActivity, profile

from runner.device.placement import tensors
from runner.experiment.build import prepare
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.training.step.train_step import make_step


class Third:
    """The third step of a run on this CPU."""

    def __init__(self, cfg):
        self.parts = parts = prepare(cfg, torch.device("cpu"))
        self.group = tuple(islice(parts.train.epoch(0), cfg.train.accumulate_steps))
        every = cfg.metrics.pull_every
        self.buffer = MetricBuffer(parts.device, lambda window: None, background=Background(), pull_every=every)
        how = {"optimizer": parts.optimizer, "precision": parts.precision, "clip_grad_norm": cfg.train.clip_grad_norm}
        self._step = make_step(parts.model, parts.task, **how, average=parts.average)
        parts.model.train()
        for _ in range(2):
            self.take()

    def take(self):
        self.buffer.write(self._step(self.group))


def measure(cfg):
    """Return the peak memory of a real step on this CPU, by torch's allocator."""
    third = Third(cfg)
    parts = third.parts
    models = [parts.model, *([parts.average.model] if parts.average else [])]
    kept = [[*model.state_dict().values()] for model in models]
    kept += [[dict(state) for state in parts.optimizer.state.values()], third.group, third.buffer._ring]
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for tree in kept for leaf in tensors(tree)
    }
    held = sum(storages.values())
    held += sum(each.device_bytes for each in (parts.train, parts.val, parts.test) if each is not None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        third.take()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    highest = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return held + highest
