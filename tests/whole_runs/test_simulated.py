"""The whole command on simulated devices: tensors follow the rules of a device, and have the CPU's numbers."""

import json
import random
from pathlib import Path

import pytest
import seeded
from simulated import run_simulated

from runner import cli
from runner.tracking.journal_reader import read_points

RUNS = {
    "mlp, streamed, clipped": ("model=mlp", "data.limit=400", "data.residency=stream", "train.clip_grad_norm=1"),
    "cnn, averaged, cosine": ("model=cnn", "data.limit=400", "train.ema_decay=0.9", "scheduler=cosine", "backends.cpu.channels_last=false"),
    "regression, accumulated": ("data=synthetic", "data.num_rows=400", "data.num_classes=null", "task=regression", "model=linear",
                                "train.accumulate_steps=2"),
}  # fmt: skip
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
@pytest.mark.parametrize(
    "name", RUNS if seeded.NUM_EXAMPLES else random.Random(f"{seeded.SEED} runs").sample([*RUNS], 1)
)
def test_a_run_on_a_pretended_device_equals_the_cpus_to_the_bit(name, tmp_path):
    found = {device: run_simulated(device, run, RUNS[name], cwd=tmp_path) for device in ("cpu", "cuda:1", "mps")}
    for device in ("cuda:1", "mps"):
        summary, points = found[device]
        assert (summary["status"], summary["device"]) == ("finished", device)
        for column, series in found["cpu"][1].items():
            if not column.startswith("speed/"):
                assert points[column] == series, f"{column} on {device}"


def test_a_missing_device_stays_missing():
    assert cli.main(["device=cuda:1", "tracking.enabled=false"]) == 2
