"""Sweeps on a machine with simulated GPUs (pretended/sitecustomize.py), forked from the tests' preloaded process."""

import os
import subprocess
import sys
from pathlib import Path

from runner.sweep.jobs import ledger
from runner.version import PACKAGES

SMALL = ("train.num_epochs=1", "train.batch_size=64", "data.limit=200", "task.plots=false", "tracking.enabled=false")
SMALL += ("placement.guard=off", "model=net")
OWN = """
import os
from torch import nn

class Net(nn.Sequential):
    def __init__(self, inputs, outputs):
        print("visible:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
        super().__init__(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))
"""
YAML = """
_target_: own.Net
inputs: ${facts.in_features}
outputs: ${facts.out_features}
"""


def sweep(warm, folder, *words, device="cuda:0", **environment):
    (folder / "own.py").write_text(OWN)
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/net.yaml").write_text(YAML)
    paths = [PACKAGES, Path(__file__).parent / "pretended", Path(__file__).parent]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PRETENDED_DEVICE": device, "OMP_NUM_THREADS": "1"}
    process = warm.program(
        [sys.executable, "-m", "runner", "-m", *SMALL, *words],
        cwd=folder,
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, errors = process.communicate()
    assert process.returncode == 0, said + errors
    (path,) = folder.glob("multirun/*/*/ledger.jsonl")
    return said, ledger.read(path.parent)
