"""A run that was stopped, and is run again in its directory, ends bitwise identical to an uninterrupted one."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from runner.config import compose
from runner.experiment import run
from runner.tracking.journal import read_points
from runner.tracking.journal_reader import read_events
from runner.training.stopping import OwnStopCondition

WORDS = {
    "plain": ["model=mlp", "model.hidden_sizes=[16]"],
    "everything": [
        "model=mlp",
        "model.hidden_sizes=[16]",
        "model.dropout=0.2",
        "scheduler=cosine",
        "train.ema_decay=0.9",
        "train.accumulate_steps=2",
        "train.clip_grad_norm=1.0",
        "metrics.every=4",
    ],
    "plateau": [
        "model=mlp",
        "model.hidden_sizes=[16]",
        "scheduler=plateau",
        "scheduler.patience=0",
        "+scheduler.threshold=0.9",
    ],
    "half": ["model=mlp", "model.hidden_sizes=[16]", "train.precision=fp16"],
    "streamed, rates by epoch": [
        "model=cnn",
        "data.residency=stream",
        "data.limit=1500",
        "+scheduler._target_=torch.optim.lr_scheduler.StepLR",
        "+scheduler.step_size=1",
    ],
}
COMMON = ["tracking.enabled=false", "task.plots=false", "train.num_epochs=3", "metrics.pull_every=12", "device=cpu"]


def composed(words, folder):
    cfg = compose.composer([])([*COMMON, *words, f"hydra.run.dir={folder}"])
    del cfg.hydra
    cfg.data.name = "digits"
    return cfg


def train(words, folder):
    return vars(run.run(composed(words, folder), Path(folder)))


def final(folder):
    """Return everything that must not depend on whether the run was stopped."""
    state = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    points = {name: rows for name, rows in read_points(folder).items() if not name.startswith("speed/")}
    return points, *(state[key] for key in ("model", "average", "optimizer", "schedule", "scaler"))


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize(("case", "stop_at"), [*zip(WORDS, (11, 5, 11, 5, 11), strict=True)])
def test_stopped_run_resumes_bitwise_identical(case, stop_at, own_folder, monkeypatch):
    whole = train(WORDS[case], "whole")
    steps = [0]
    original = OwnStopCondition.__call__

    def stop_in_the_middle(condition, step, *, at_once=False):
        answer = original(condition, step, at_once=at_once)
        steps[0] += not at_once
        if steps[0] == stop_at and not at_once:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    monkeypatch.setattr(OwnStopCondition, "__call__", stop_in_the_middle)
    first = train(WORDS[case], "parts")
    assert first["status"] == "killed" and 0 < first["num_steps"] < whole["num_steps"]
    second = train(WORDS[case], "parts")
    assert second["status"] == "finished"
    for one, other in zip(final(own_folder / "whole"), final(own_folder / "parts"), strict=True):
        assert_same(one, other)
    metrics = [{k: v for k, v in found["metrics"].items() if "speed" not in k} for found in (whole, second)]
    assert metrics[0] == metrics[1]
    assert whole["best"] == second["best"] and whole["num_samples"] == second["num_samples"]
    assert whole["host_reads"]["points"] == second["host_reads"]["points"]


def test_run_killed_before_checkpoint_restarts_same_id(own_folder):
    words = WORDS["plain"]
    train(words, "run")
    shutil.rmtree("run/checkpoints")
    Path("run/summary.json").unlink()
    before = read_points(Path("run"))
    assert train(words, "run")["status"] == "finished"
    assert read_points(Path("run")) == before
    starts = [event["uid"] for event in read_events(Path("run")) if event["kind"] == "start"]
    assert len(starts) == 2 and len(set(starts)) == 1


def test_finished_run_again_only_tests(own_folder):
    first = train(WORDS["plain"], "run")
    second = train(WORDS["plain"], "run")
    assert second["num_steps"] == first["num_steps"] and second["metrics"].items() >= {
        ("test/accuracy", first["metrics"]["test/accuracy"])
    }
    assert second["seconds"]["train"] >= first["seconds"]["train"]
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"
