"""Plans of the zoo on one device, in a process of its own (tests/support/simulated.py); and real steps beside simulated ones."""

from __future__ import annotations

import functools
import warnings
from itertools import islice

import torch
from judge import REQUEST
from torch.utils._python_dispatch import TorchDispatchMode
from truth import measure
from zoo import case_of, words

from runner.config.compose import composed_with, composer
from runner.experiment.build import prepare
from runner.inspection.costs import Speeds
from runner.inspection.host_reads import HostReads
from runner.plan.dry_run import build
from runner.plan.simulator import simulated_device
from runner.plan.worker import look
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.training.step.train_step import make_step

NOT_COUNTED = ("aten.detach.default", "prim.device.default")


@functools.cache
def _composed(optimizer, precision):
    return composed_with(composer([]), words(optimizer, precision))


def configured(case, precision="fp32"):
    cfg = _composed(case.optimizer, precision).copy()
    cfg.model.name = cfg.task.name = cfg.data.case = case.name
    return cfg


def plans(_, device_name, names, in_halves):
    """names: of the cases. in_halves: the names of those that are tried in bf16, too."""
    warnings.simplefilter("ignore")
    found = {}
    with simulated_device(device_name, has_numbers=False) as device:
        for case in map(case_of, names):
            found[case.name] = look(configured(case), device, REQUEST)
            if case.name in in_halves:
                found[f"{case.name}, bf16"] = look(configured(case, "bf16"), device, REQUEST)
    return found


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Seen:
    def __init__(self):
        self.names = []

    def after(self, done):
        self.names.append(str(done.op))

    def failed(self, what, inputs, error):
        pass


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
    trial = build(cfg, device, speeds=Speeds())
    trial.take_steps()
    seen, step = Seen(), trial.step()
    with HostReads(device, observers=(seen,)):
        trial.buffer.write(step(trial.group))
    return seen.names, trial.costs.peak.num_bytes


def compare(_, names):
    """The operations and the highest memory of each one's third step. names: [case, precision]."""
    warnings.simplefilter("ignore")
    found = {}
    for name, precision in names:
        cfg = configured(case_of(name), precision)
        cfg.backends.cpu.onednn = False  # a simulated device takes torch's own products
        found[f"{name}, {precision}"] = {"real": real_steps(cfg.copy()), "real_bytes": measure(cfg.copy())}
    with simulated_device("cpu", has_numbers=False) as device:
        for name, precision in names:
            each = found[f"{name}, {precision}"]
            each["plan"], each["planned_bytes"] = simulated_steps(configured(case_of(name), precision), device)
    for each in found.values():
        for key in ("real", "plan"):
            each[key] = [name for name in each[key] if name not in NOT_COUNTED and "profiler" not in name]
    return found
