"""What is advised: the rule that saves most, its estimate from the figures alone, and nothing where nothing is sure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from runner.experiment import time_spent
from runner.experiment.time_spent import Trained, best
from runner.inspection.findings import LIKELY, Finding
from runner.training.loop import Limits
from runner.training.result import Result
from runner.training.step.clock import StepTimes

USUAL = {"data": 2.0, "launch": 2.0, "compute": 95.0, "metrics": 1.0}


class Rows(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.zeros(2), 0


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch):
    monkeypatch.setattr(time_spent, "num_usable_cpus", lambda: 4)
    monkeypatch.setattr(time_spent, "_has_compiler", lambda: True)


def trained(spent=None, *, device="cpu", batch_size=128, rows=None, limits=None, **more):
    spent = {**USUAL, **(spent or {})}
    train = SimpleNamespace(
        batch_size=batch_size,
        accumulate_steps=1,
        compile=more.get("compile", False),
        cuda_graph=False,
        recompute=more.get("recompute", []),
        on_oom=more.get("on_oom", "fail"),
    )
    batches = SimpleNamespace(num_rows=10_000, num_batches=100, batch_size=batch_size, indexed=lambda: object())
    parts = SimpleNamespace(
        device=torch.device(device),
        splits=SimpleNamespace(train=rows),
        train=batches,
        optimizer=None,
        limits=limits or Limits(10, 1000),
    )
    result = Result(best=None, findings=more.get("findings", []), times=more.get("times", {}))
    result.num_processes = more.get("num_processes", 1)
    result.steps = StepTimes(1000, 50, 0.0, {"data": spent["data"], "forward": 40.0, "backward": 50.0})
    placement = SimpleNamespace(guard=more.get("guard", "first_step"), strategy=more.get("strategy", "ddp"))
    settings = SimpleNamespace(train=train, placement=placement, experiment=more.get("experiment", {}))
    return Trained(parts, settings, result, spent)


@pytest.mark.parametrize(
    ("run", "kind", "write", "share"),
    [
        (trained({"launch": 100.0}, device="cuda"), "launch-bound", "train.cuda_graph=true", 0.9 * 100 / 198),
        (trained({"launch": 100.0}, batch_size=4), "tiny batch", "train.batch_size=64", 60 / 64 * 101 / 198),
        (
            trained({"validation": 100.0}, times={"validation": 10}),
            "validation",
            "train.evaluate_every_steps=1000",
            0.9 * 0.5,
        ),
        (
            trained({"checkpoints": 100.0}, times={"last": 1000}, limits=Limits(10, 1000, save_every_steps=1)),
            "checkpoints",
            "train.checkpoint_every_steps=34",
            (1 - 1 / 34) * 0.5,
        ),
        (
            trained({"launch": 90.0}, device="cuda", findings=[Finding(LIKELY, "host read", "item()", "net.py:3")]),
            "host read",
            "a step without it",
            0.8 * 90 / 188,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rule(run, kind, write, share):
    found = best(run)
    assert found is not None
    assert (found.kind, found.write) == (kind, write)
    assert found.seconds / run.seconds == pytest.approx(share, rel=0.02)
    assert f"would save about {share:.0%} of the training after its first steps" in found.in_words(run.seconds)


def test_readers_and_what_they_can_not_do(monkeypatch):
    # 0.512 s a batch; by 4 readers 0.128 s, of which the step hides 0.098
    monkeypatch.setattr(time_spent, "_share_on_cpu", lambda rows: 0.05)
    found = best(trained({"data": 512.0}, rows=Rows(), experiment={"data.num_workers": 0}))
    assert found is not None and found.write == "data.num_workers=4" and found.why == "a row takes 4 ms"
    assert found.seconds == pytest.approx(0.85 * (512 - 30), rel=0.01)
    found = best(trained({"data": 512.0}, rows=Rows(), experiment={"data.num_workers": 4}))
    assert found is not None and "as tensors" in found.write
    assert found.seconds == pytest.approx(512 * 0.9)


@pytest.mark.parametrize(
    "run",
    [
        trained(),
        trained({"launch": 100.0}, device="cuda", compile=True),
        trained({"launch": 100.0}, device="mps"),
        *(
            trained({"launch": 100.0}, device="cuda", **refused)
            for refused in (
                {"recompute": ["blocks.*"]},
                {"strategy": "fsdp", "num_processes": 2},
                {"guard": "always"},
            )
        ),
        trained({"launch": 100.0}, device="cuda", on_oom="split"),
        trained({"launch": 100.0}, device="cuda", num_processes=2),
        trained({"validation": 100.0}, times={"validation": 1}),
        trained({"checkpoints": 100.0}, times={"best": 1000, "last": 1}),
        trained({"data": 100.0}),
    ],
)
def test_nothing_is_advised_that_is_not_sure(run):
    assert best(run) is None


def test_the_one_that_saves_most():
    run = trained({"launch": 100.0, "validation": 80.0}, times={"validation": 20})
    assert best(run).kind == "validation"
