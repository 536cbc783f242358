"""A sweep on a machine with two simulated GPUs: which job runs where, the devices that a job sees, and equal numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import waiting

from runner.sweep.jobs import ledger
from runner.tracking.journal_reader import read_series
from runner.version import PACKAGES

SUPPORT = Path(waiting.__file__).parent
WORDS = (
    "device=cuda:0,cuda:1,cpu,auto",
    "model=net",
    "sweep.slots.cuda=2",
    "hydra.sweep.dir=swept",
    "train.num_epochs=1",
)
WORDS += ("train.batch_size=64", "data.limit=200", "task.plots=false", "tracking.enabled=false", "placement.guard=off")
OWN = """
import os
from torch import nn

class Net(nn.Sequential):
    def __init__(self, inputs, outputs):
        print("visible:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
        super().__init__(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))
"""
YAML = "_target_: own.Net\ninputs: ${facts.in_features}\noutputs: ${facts.out_features}\n"


@pytest.mark.slow
def test_jobs_see_only_their_gpu(own_folder, warm):
    (own_folder / "own.py").write_text(OWN)
    (own_folder / "conf/model").mkdir(parents=True)
    (own_folder / "conf/model/net.yaml").write_text(YAML)
    paths = os.pathsep.join(map(str, (PACKAGES, SUPPORT / "pretended", SUPPORT)))
    pretended = {
        "PYTHONPATH": paths,
        "PRETENDED_DEVICE": "cuda:0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "5,7",
    }
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "runner", "-m", *WORDS]
    process = warm.program(command, cwd=own_folder, env={**os.environ, **pretended}, **streams)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "slots    cuda:0, cuda:1, cpu, cuda:0 (2), cuda:1 (2)" in out
    found = ledger.read(own_folder / "swept")
    jobs = [(job, found.folder_of(job)) for job in found.jobs.values()]
    devices = [job.device for job, _ in jobs]
    assert devices[:3] == ["cuda:0", "cuda:1", "cpu"] and devices[3].startswith("cuda:")
    seen = [(folder / "console.log").read_text().partition("visible: ")[2].splitlines()[0] for _, folder in jobs]
    assert seen == [{"cuda:0": "5", "cuda:1": "7", "cpu": ""}[device] for device in devices]
    summaries = [json.loads((folder / "summary.json").read_text()) for _, folder in jobs]
    assert [summary["device"] for summary in summaries] == devices
    assert summaries[3]["device_reason"].startswith("auto: ")
    for device, (_, folder) in zip(devices, jobs, strict=True):
        rerun = (folder / "rerun.yaml").read_text()
        assert ("memory_fraction: 0.5" in rerun) == (device != "cpu") and "sweep:" not in rerun
    losses = [read_series(folder)["train/loss"][2].tolist() for _, folder in jobs]
    assert losses[0] == losses[1] == losses[2] == losses[3], "equal seeds, bitwise identical losses on every device"
