"""Plans of models on a simulated device, for run_simulated, and real steps on the CPU for comparison."""

from __future__ import annotations

import functools
import warnings
from dataclasses import asdict
from itertools import islice

import torch
from judged import OPTIMIZERS
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.compose import composed_with, composer
from runner.device.hardware import Speeds
from runner.device.placement import tensors
from runner.experiment.build import prepare
from runner.inspection.operations import OperationObserver, observe
from runner.tools.plan.dry_run import SimulatedRun
from runner.tools.plan.simulator import simulated_device
from runner.tools.plan.worker import look
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.training.step.train_step import make_step

REQUEST = {"speeds": asdict(Speeds()), "usable_bytes": None, "precisions": [], "seconds": 0, "processes": {}}
NOT_COUNTED = ("aten.detach.default", "prim.device.default")
IMAGES = ["data=synthetic", "data.num_rows=64", "data.shape=[3,16,16]", "train.batch_size=16"]
SIGNALS = ["data=synthetic", "data.num_rows=64", "data.shape=[2,20]", "train.batch_size=16"]
#: reproduces one number: no task for autoencoders is needed
SAME = ["data=synthetic", "data.num_rows=64", "data.num_features=1", "data.num_classes=null", "task=regression"]
MODELS = {
    "cnn on signals": ["model=cnn", "model.kernel_size=5", *SIGNALS],
    "resnet18": ["model=resnet", "model.width=8", *IMAGES],
    "vit": ["model=vit", "model.width=24", "model.depth=2", *IMAGES],
    "gru": ["model=gru", "model.hidden_size=8", "model.bidirectional=true", *SIGNALS],
    "lstm": ["model=lstm", "model.hidden_size=8", "model.num_layers=2", "model.pooling=mean", *SIGNALS],
    "frozen": ["model=resnet", "model.width=8", "model.freeze=stem", "optimizer.no_decay=norms_and_biases", *IMAGES],
    "autoencoder": ["model=autoencoder", *SAME],
    "mnist1d": ["model=mlp", "data=mnist1d", "data.num_rows=100", "data.num_test_rows=20"],
}


def cfg_of(name):
    """Return the configuration of a model of the runner, or of a case with a precision: "decoder, bf16"."""
    if name in MODELS:
        return composed_with(composer([]), MODELS[name])
    case, _, precision = name.partition(", ")
    cfg = _composed(OPTIMIZERS.get(case), precision or "fp32").copy()
    cfg.model.name = cfg.task.name = cfg.data.case = case
    return cfg


@functools.cache
def _composed(optimizer, precision):
    words = [f"{group}=judged" for group in ("model", "task", "data")]
    words += [f"train.precision={precision}", "data.num_workers=0"]
    return composed_with(composer([]), words + ([f"optimizer._target_={optimizer}"] if optimizer else []))


def plans(_, device_name, names):
    warnings.simplefilter("ignore")
    with simulated_device(device_name, has_numbers=False) as device:
        return {name: look(cfg_of(name), device, REQUEST) for name in names}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Seen(OperationObserver):
    def __init__(self):
        self.names = []

    def after(self, done):
        self.names.append(str(done.op))


def real_steps(cfg):
    parts = prepare(cfg, torch.device("cpu"))
    group = tuple(islice(parts.train.epoch(0), 1))
    step = make_step(parts.model, parts.task, optimizer=parts.optimizer, precision=parts.precision)
    buffer = MetricBuffer(parts.device, lambda window: None, background=Background(), pull_every=100)
    parts.model.train()
    for _ in range(2):
        buffer.write(step(group))
    operations = Operations()
    with operations:
        buffer.write(step(group))
    return operations.names


def simulated_steps(cfg, device):
    run = SimulatedRun(cfg, device)
    run.take_steps()
    seen, step = Seen(), run.step()
    with observe(seen):
        run.buffer.write(step(run.group))
    return seen.names, run.costs.peak.num_bytes


def compare_with_real_steps(_, names):
    """Return the operations and the peak memory of a real and a simulated third step."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        cfg = cfg_of(name)
        cfg.backends.cpu.onednn = False  # as on a simulated device
        found[name] = {"real": real_steps(cfg.copy()), "real_bytes": measure(cfg.copy())}
    with simulated_device("cpu", has_numbers=False) as device:
        for name, each in found.items():
            each["plan"], each["planned_bytes"] = simulated_steps(cfg_of(name), device)
    for each in found.values():
        for key in ("real", "plan"):
            each[key] = [name for name in each[key] if name not in NOT_COUNTED and "profiler" not in name]
    return found


def storages(trees):
    found = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for tree in trees for leaf in tensors(tree)}
    return sum(found.values())


def measure(cfg):
    """Return the peak memory of a real step on this CPU, by torch's allocator."""
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
