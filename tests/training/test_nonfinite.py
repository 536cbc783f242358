"""train.on_nonfinite: a step whose gradients are NaN or infinite ends the run, is skipped, or is rolled back."""

import copy
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from runner import cli
from runner.device.precision import SkippingScaler, make_precision
from runner.tasks.classification import Classification
from runner.tracking.journal_reader import read_points
from runner.training.checkpoint import load
from runner.training.muon import Muon
from runner.training.optimizer import make_optimizer
from runner.training.step.train_step import make_step

#: 64 rows, one of which overflows the loss
PARTS = """
import torch
from torch import nn

def rows(bad=1):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 3, generator=draw)
    targets = inputs[:, 1] + inputs[:, 2]
    targets[:bad] = 3e38
    return inputs, targets

class Net(nn.Sequential):
    def __init__(self, outputs):
        super().__init__(nn.BatchNorm1d(3), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))
"""
WORDS = ["device=cpu", "train.batch_size=16", "tracking.enabled=false", "train.num_epochs=3", "metrics.pull_every=3"]
OPTIMIZERS = {
    "fused adamw": partial(torch.optim.AdamW, weight_decay=0.1),
    "fused sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "single sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=False, foreach=False),
    "rmsprop": torch.optim.RMSprop,
    "muon": partial(Muon, lr=0.1),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(seed, factor=1.0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=draw) * factor, torch.randint(3, (16,), generator=draw)


def state(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_nothing_and_others_are_identical(name, clip):
    made: list[tuple] = []
    for skips in (True, False):
        model = net()
        optimizer = make_optimizer(OPTIMIZERS[name], model, device=torch.device("cpu"), may_skip=skips)
        precision = make_precision("fp32", device=torch.device("cpu"), skips=skips)
        settings = {"optimizer": optimizer, "precision": precision, "clip_grad_norm": clip}
        made.append((model, optimizer, make_step(model, Classification(), **settings), precision.scaler))
    (model, optimizer, step, scaler), (plain, _, plain_step, _) = made
    if name != "rmsprop":  # torch makes its state in the first step
        assert step([batch(0, float("nan"))])["skipped"] == 1
    for seed in range(3):
        assert step([batch(seed)])["skipped"] == 0
        plain_step([batch(seed)])
        before = state(model, optimizer)
        assert step([batch(seed, float("inf"))])["skipped"] == 1
        after = state(model, optimizer)
        after[0]["1.num_batches_tracked"] = before[0]["1.num_batches_tracked"]
        assert equal(before[0], after[0]) and equal(before[1], after[1])
    weights = {key: value for key, value in plain.state_dict().items() if "tracked" not in key}
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in weights.items())
    again = SkippingScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.num_skipped() == scaler.num_skipped() == 3 + (name != "rmsprop")


@pytest.fixture
def own(own_folder):
    (own_folder / "my_nonfinite.py").write_text(PARTS)
    for group, text in (
        ("data", "_target_: my_nonfinite.rows\nbad: 1"),
        ("model", "_target_: my_nonfinite.Net\noutputs: 1"),
    ):
        (own_folder / "conf" / group).mkdir(parents=True)
        (own_folder / "conf" / group / "own.yaml").write_text(text)
    return own_folder


def run(*words, of="run"):
    code = cli.main(["data=own", "model=own", "task=regression", *WORDS, f"hydra.run.dir={of}", *words])
    return code, json.loads(Path(of, "summary.json").read_text())


def losses(name):
    return dict(read_points(Path(name))["train/loss"])


def test_run_that_skips_finishes_counts_and_resumes(own):
    code, summary = run()
    assert code == 1 and summary["ending"] == "not_finite"
    code, summary = run("train.on_nonfinite=skip", "train.num_epochs=5", of="skips")
    skipped = [step for step, value in read_points(own / "skips")["train/skipped"] if value]
    assert code == 0 and summary["status"] == "finished" and len(skipped) == 5
    assert [step for step, loss in losses("skips").items() if not math.isfinite(loss)] == skipped
    assert any("5 of 20 steps were skipped" in hint for hint in summary["hints"])
    assert run("train.on_nonfinite=skip", "train.num_epochs=2", of="resumed")[0] == 0
    assert cli.main(["resume", "resumed", "train.num_epochs=5"]) == 0
    assert equal(load(Path("skips/checkpoints/last.pt"))["model"], load(Path("resumed/checkpoints/last.pt"))["model"])


def test_run_that_skips_all_steps_fails(own):
    code, summary = run("train.on_nonfinite=skip", "data.bad=80", "train.batch_size=4", "train.num_epochs=2")
    assert code == 1 and "the gradients of the last 16 steps are not finite" in summary["error"]


def test_rolled_back_run_halves_rates_and_continues(own):
    words = ["train.on_nonfinite=rollback", "train.checkpoint_every_steps=2", "scheduler=cosine", "train.num_steps=24"]
    assert run(*words, "data.bad=0", of="sound")[0] == 0
    code, summary = run(*words, of="rolls")
    points, sound = ({key: dict(each) for key, each in read_points(own / name).items()} for name in ("rolls", "sound"))
    wrong = [step for step, loss in points["train/loss"].items() if not math.isfinite(loss)]
    num = summary["metrics"]["train/rollbacks"]
    assert code == 0 and 1 < num == len(points["train/rollbacks"]) <= len(wrong) == 6
    assert points["train/lr"][20] == pytest.approx(
        sound["train/lr"][20] / 2 ** len([s for s in points["train/rollbacks"] if s < 20])
    )
    assert sorted(points["train/loss"]) == list(range(1, 25))  # each step once
    assert all(value.isfinite().all() for value in load(Path("rolls/checkpoints/last.pt"))["model"].values())


def test_rolled_back_run_resumes_identically(own):
    words = ["train.on_nonfinite=rollback", "train.checkpoint_every_steps=2", "metrics.pull_every=5"]
    for name, num_epochs in (("whole", 6), ("resumed", 3)):
        assert run(*words, f"train.num_epochs={num_epochs}", of=name)[0] == 0
    assert cli.main(["resume", "resumed", "train.num_epochs=6"]) == 0
    whole, resumed = (load(Path(name, "checkpoints/last.pt")) for name in ("whole", "resumed"))
    assert equal(whole["model"], resumed["model"]) and whole["rollbacks"] == resumed["rollbacks"] > 2


def test_rolled_back_run_ends_after_ten(own):
    code, summary = run("train.on_nonfinite=rollback", "train.num_epochs=20")
    assert code == 1 and summary["metrics"]["train/rollbacks"] == 10 and summary["ending"] == "not_finite"
