"""Sweeps on a machine with GPUs that are pretended (pretended/sitecustomize.py)."""

import os
import subprocess
import sys
from pathlib import Path

from runner.sweep.jobs import ledger
from runner.version import PACKAGES

SMALL = ("train.num_epochs=2", "train.batch_size=256", "tracking.enabled=false", "placement.guard=off", "model=net")
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


def sweep(folder, *words, device="cuda:0", **environment):
    (folder / "own.py").write_text(OWN)
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/net.yaml").write_text(YAML)
    paths = [PACKAGES, Path(__file__).parent / "pretended", Path(__file__).parent]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PRETENDED_DEVICE": device, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "runner", "-m", *SMALL, *words],
        cwd=folder,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("multirun/*/*/ledger.jsonl")
    return done.stdout, ledger.read(path.parent)
