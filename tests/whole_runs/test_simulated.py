"""The whole command on simulated devices: tensors follow the rules of a device, and have the CPU's numbers."""

import json
from pathlib import Path

import pytest
from simulated import run_simulated

from runner import cli
from runner.tracking.journal_reader import read_points

WORDS = (
    *("model=cnn", "data.limit=200", "data.residency=stream", "train.clip_grad_norm=1", "train.ema_decay=0.9"),
    *("scheduler=cosine", "backends.cpu.channels_last=false", "train.accumulate_steps=2"),
)
SHORT = (
    "train.num_epochs=2",
    "train.batch_size=64",
    "tracking.enabled=false",
    "metrics.pull_every=4",
    "placement.guard=off",
)


def run(device, words):
    folder = Path(device.type)
    assert cli.main([f"device={device}", *SHORT, *words, f"hydra.run.dir={folder}"]) == 0
    return json.loads((folder / "summary.json").read_text()), read_points(folder)


@pytest.mark.slow
def test_run_on_simulated_device_equals_cpu(tmp_path):
    found = {device: run_simulated(device, run, WORDS, cwd=tmp_path) for device in ("cpu", "cuda:1", "mps")}
    for device in ("cuda:1", "mps"):
        summary, points = found[device]
        assert (summary["status"], summary["device"]) == ("finished", device)
        for column, series in found["cpu"][1].items():
            if not column.startswith("speed/"):
                assert points[column] == series, f"{column} on {device}"


def test_a_missing_device_stays_missing():
    assert cli.main(["device=cuda:1", "tracking.enabled=false"]) == 2
