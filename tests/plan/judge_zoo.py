"""Plans of the zoo on one device, in one process: python judge_zoo.py DEVICE ANSWER.json

On cpu: the operations and the highest memory of real steps beside those of simulated ones.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from truth import measure
from zoo import BY_VALUES, COMPARED, IN_HALVES, ON_MPS, SOUND, case_of, words

from runner.background import Background
from runner.cli import composed_with
from runner.compose import composer, hydra_session
from runner.metrics import MetricBuffer
from runner.parts import prepare
from runner.plan.child import look
from runner.plan.trial import build
from runner.simulated import simulated_device
from runner.step import make_step
from runner.watch.costs import Speeds
from runner.watch.host_reads import HostReads

REQUEST = {"speeds": asdict(Speeds()), "usable_bytes": None, "precisions": [], "seconds": 0, "processes": {}}
NOT_COUNTED = ("aten.detach.default", "prim.device.default")


def plans(device_name):
    found = {}
    with simulated_device(device_name, has_numbers=False) as device:
        for case in (*SOUND, *BY_VALUES):
            if device.type == "mps" and case.name not in ON_MPS:
                continue
            found[case.name] = look(composed_with(composer([]), words(case)), device, REQUEST)
            if device.type == "cuda" and case.name in IN_HALVES:
                found[f"{case.name}, bf16"] = look(composed_with(composer([]), words(case, "bf16")), device, REQUEST)
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


def real_steps(words_of_case):
    cfg = composed_with(composer([]), words_of_case)
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


def simulated_steps(words_of_case, device):
    trial = build(composed_with(composer([]), words_of_case), device, speeds=Speeds())
    trial.take_steps()
    seen, step = Seen(), trial.step()
    with HostReads(device, observers=(seen,)):
        trial.buffer.write(step(trial.group))
    return seen.names, trial.costs.peak.num_bytes


def compare():
    found = {}
    cases = {f"{name}, {precision}": words(case_of(name), precision) for name, precision in COMPARED}
    for name, given in cases.items():
        found[name] = {"real": real_steps(given)}
    with simulated_device("cpu", has_numbers=False) as device:
        for name, given in cases.items():
            found[name]["plan"], found[name]["planned_bytes"] = simulated_steps(given, device)
    for each in found.values():
        for key in ("real", "plan"):
            each[key] = [name for name in each[key] if name not in NOT_COUNTED and "profiler" not in name]
    return cases, found


def main():
    device_name, answer = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with hydra_session(["runner"]):
        if device_name != "cpu":
            found = plans(device_name)
        else:
            cases, found = compare()
    if device_name == "cpu":  # it opens a session of its own
        for name, given in cases.items():
            found[name]["real_bytes"] = measure(given)
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
