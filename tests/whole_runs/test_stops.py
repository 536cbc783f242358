"""A run that is killed after any of its steps, or repeatedly, ends bitwise identical to an uninterrupted one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.tracking.journal import read_points
from runner.tracking.mlflow_store import open_store
from runner.tracking.sync import sync

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="the runs are forked from one with torch, which a Mac's libraries do not outlive",
    ),
]

WORDS = (
    *("device=cpu", "tracking.enabled=false", "task.plots=false", "model=mlp", "model.hidden_sizes=[16]"),
    *("model.dropout=0.2", "scheduler=cosine", "data.limit=60", "train.num_epochs=3", "train.batch_size=8"),
    *("train.accumulate_steps=2", "train.clip_grad_norm=1.0", "train.ema_decay=0.9", "train.early_stopping.patience=2"),
    *("metrics.pull_every=6", "metrics.every=2"),
)


@pytest.fixture
def stopped(warm, tmp_path):
    def stopped(mode, *words):
        script = Path(__file__).with_name("stops.py")
        command = [sys.executable, str(script), str(tmp_path), mode, *WORDS, *words]
        process = warm.program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        told, _ = process.communicate()
        assert process.returncode == 0, told

    return stopped


def digest(value):
    """Return a state with the bytes of its tensors."""
    if isinstance(value, torch.Tensor):
        return repr((value.dtype, tuple(value.shape))), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(key, digest(inner)) for key, inner in value.items()]
    return list(map(digest, value)) if isinstance(value, list | tuple) else repr(value)


def outcome(folder):
    """Return all values that must not depend on when the run stopped: its last and best states without the seconds, and its points."""
    states = {}
    for name in ("last", "best"):
        state = torch.load(folder / "checkpoints" / f"{name}.pt", weights_only=True)
        states |= {f"{name} {key}": digest(value) for key, value in state.items() if key != "seconds"}
    return states | values(read_points(folder))


def values(points):
    return {name: [tuple(row) for row in rows] for name, rows in points.items() if not name.startswith("speed/")}


def in_mlflow(folders, store):
    """Sync the runs. Returns {name: [(step, value)]} by directory; a value that the store has twice appears twice."""
    client = open_store(store)
    found = {}
    for folder in folders:
        ack = sync(folder, store)
        assert ack.is_complete, ack.error
        run = client.get_run(ack.run_id)
        assert run.info.status == "FINISHED"
        names = [name for name in run.data.metrics if not name.startswith(("speed/", "system/"))]
        histories = {name: client.get_metric_history(ack.run_id, name) for name in names}
        found[folder] = {
            name: sorted((point.step, point.value) for point in points) for name, points in histories.items()
        }
    return found


#: where the rows are, and the steps between two checkpoints
@pytest.mark.parametrize(("residency", "every"), [("device", 4), ("stream", 1)])
def test_run_killed_after_each_step_ends_identical(residency, every, stopped, tmp_path, empty_store):
    stopped("each", f"data.residency={residency}", f"train.checkpoint_every_steps={every}")
    shutil.copy(empty_store, tmp_path / "store.db")
    expected = outcome(tmp_path / "whole")
    assert {name.partition("/")[0] for name in expected} >= {"train", "val", "test", "last model", "last optimizer"}
    folders = [tmp_path / str(number) for number in range(1, 9)]
    assert [folder.name for folder in folders if outcome(folder) != expected] == []
    sent = [folders[0], folders[3], folders[-1]]
    tracked = in_mlflow([tmp_path / "whole", *sent], f"sqlite:///{tmp_path}/store.db")
    whole = tracked.pop(tmp_path / "whole")
    assert whole == values(read_points(tmp_path / "whole"))
    assert [folder.name for folder, points in tracked.items() if points != whole] == []


def test_run_killed_at_random_moments_ends_identical(stopped, tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "store.db")
    words = [
        "train.checkpoint_every_steps=4",
        "train.num_epochs=30",
        "train.early_stopping.patience=null",
        "data.residency=stream",
        "data.limit=340",
    ]
    stopped("3", *words)
    expected = outcome(tmp_path / "whole")
    folders = sorted(tmp_path.glob("run*"))
    assert [folder.name for folder in folders if outcome(folder) != expected] == []
    tracked = in_mlflow([tmp_path / "whole", *folders], f"sqlite:///{tmp_path}/store.db")
    whole = tracked.pop(tmp_path / "whole")
    assert [folder.name for folder, points in tracked.items() if points != whole] == []
