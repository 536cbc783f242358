"""State outside state_dict() is part of a checkpoint, and validation neither sees nor changes it."""

import json
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from runner import cli
from runner.tracking.journal import read_points
from runner.training.carried_state import CarriedState, restored

CPU = torch.device("cpu")
PROGRAM = """
import os
import random
import signal
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def rows():
    noise = torch.Generator().manual_seed(3)
    x = torch.randn(90, 6, 4, generator=noise)
    train, val = (x[:60], x[:60].cumsum(1)), (x[60:], x[60:].cumsum(1))
    return {"train": TensorDataset(*train), "val": TensorDataset(*val)}

def rows_for_training():
    return {"train": rows()["train"]}

class Memory(nn.Module):
    resets = False
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)
        self.hidden, self.num_calls = None, 0
        self.noise = torch.Generator().manual_seed(1)
        self.register_buffer("level", torch.zeros(()), persistent=False)
    def forward(self, x):
        self.num_calls += 1
        self.level += 0.01
        hidden, size = self.hidden, len(x)
        hidden = torch.zeros(1, 5, 8) if hidden is None else hidden.detach()
        hidden = hidden.mean(1, keepdim=True).expand(1, size, 8)
        outputs, self.hidden = self.layer(x, hidden.contiguous() * (1 + 0.1 * torch.rand((), generator=self.noise)))
        return self.head(outputs) * (1 + self.num_calls / 100) + self.level

class Resetting(Memory):
    def reset_state(self):
        self.hidden = None

class Loss:
    def __init__(self):
        self.level, self.losses = torch.zeros(()), []
    def __call__(self, model, batch):
        loss = F.mse_loss(model(batch[0]), batch[0].cumsum(1)) * (1 + 0.1 * self.level)
        self.level.mul_(0.9).add_(loss.detach())
        self.losses = [*self.losses[-2:], loss.detach()]
        kills = os.environ.get("KILLS", "").split()
        if str(model.num_calls) in kills:
            os.environ["KILLS"] = " ".join(kill for kill in kills if kill != str(model.num_calls))
            signal.raise_signal(signal.SIGTERM)
        return {"loss": loss + 0.01 * torch.stack(self.losses).mean()}

class Drawing(Loss):
    def __init__(self):
        super().__init__()
        self.random = random.Random(1)
    def __call__(self, model, batch):
        self.random.random()
        return super().__call__(model, batch)
"""
WORDS = [
    *("model=net", "data._target_=memory.rows", "task=own", "task.function._target_=memory.Loss"),
    *(
        "task.function._partial_=false",
        "device=cpu",
        "tracking.enabled=false",
        "train.batch_size=8",
        "train.num_epochs=3",
    ),
    *("data.test_fraction=0", "optimizer.lr=0.001", "metrics.pull_every=1"),
]


@pytest.fixture
def program(own_folder):
    Path("memory.py").write_text(PROGRAM)
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/net.yaml").write_text("_target_: memory.Memory\n")


def final(folder):
    state = torch.load(f"{folder}/checkpoints/last.pt", weights_only=True)
    points = {name: series for name, series in read_points(Path(folder)).items() if not name.startswith("speed/")}
    return state["model"], state["carried"][0], points


def assert_equal(one, other):
    assert [str(part) for part in final(one)] == [str(part) for part in final(other)]


def test_hidden_state_killed_anywhere_resumes_bitwise(program, monkeypatch):
    assert cli.main([*WORDS, "hydra.run.dir=whole"]) == 0
    kills = random.Random(7).sample(range(2, 24), 4)
    monkeypatch.setenv("KILLS", " ".join(map(str, kills)))
    code, num_kills = cli.main([*WORDS, "hydra.run.dir=cut"]), 0
    while code == 143:
        num_kills += 1
        code = cli.main(["resume", "cut"])
    assert (code, num_kills) == (0, 4)
    assert_equal("cut", "whole")


@pytest.mark.parametrize("kind", ["Memory", "Resetting"])
def test_validation_in_mid_epoch_changes_nothing(kind, program):
    words = [*WORDS, f"model._target_=memory.{kind}", "train.num_epochs=2"]
    assert cli.main([*words, "hydra.run.dir=often", "train.evaluate_every_steps=3"]) == 0
    assert (
        cli.main([*words, "hydra.run.dir=never", "data._target_=memory.rows_for_training", "data.val_fraction=0"]) == 0
    )
    often, never = final("often"), final("never")
    assert often[2]["train/loss"] == never[2]["train/loss"]
    assert [str(part) for part in often[:2]] == [str(part) for part in never[:2]]


class Kinds(nn.Module):
    """Changes a value of each kind in each forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.constant, self.pair, self.levels = torch.ones(3), (torch.zeros(2), 0), {"low": torch.zeros(1)}
        self.recent, self.counts, self.noise = deque(maxlen=2), np.zeros(3), torch.Generator().manual_seed(1)
        self.inner = torch.optim.Adam(self.layer.parameters())
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x):
        drawn = torch.rand((), generator=self.noise).item()
        self.pair = self.pair[0] + drawn, self.pair[1] + 1
        self.levels["low"] += drawn
        self.levels[str(self.pair[1])] = drawn
        self.recent.append(torch.tensor(drawn))
        self.counts += drawn
        self.mean = self.mean + drawn
        self.layer(x).sum().backward()
        self.inner.step()

    def values(self):
        inner = [state["step"].item() for state in self.inner.state.values()]
        return str([self.pair, self.levels, self.recent, self.counts, self.mean, self.noise.get_state().sum(), inner])


class Buffered:
    def __init__(self):
        self.rows = []

    def state_dict(self):
        return {"rows": list(self.rows)}

    def load_state_dict(self, state):
        self.rows = list(state["rows"])


def test_every_kind_of_state_is_saved(tmp_path):
    models, tasks = [Kinds(), Kinds()], [Buffered(), Buffered()]
    one, other = (CarriedState(model, task, device=CPU) for model, task in zip(models, tasks, strict=True))
    assert one.state().keys() == {"model.noise", "model.inner", "task."}
    for _ in range(3):
        models[0](torch.ones(1, 2))
        tasks[0].rows.append(torch.ones(1))
    torch.save(one.state(), tmp_path / "state.pt")
    other.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert models[0].values() == models[1].values() and tasks[0].rows == tasks[1].rows
    assert "model.constant" not in one.state() and models[1].recent.maxlen == 2
    assert set(one.replaced()) == {"model.pair", "model.levels", "model.recent", "model.mean"}


def test_restored_undoes_changes_of_every_kind():
    model, task = Kinds(), Buffered()
    model(torch.ones(1, 2))
    before, noise = model.values(), model.noise
    with restored(model, task):
        model(torch.ones(1, 2))
        model.extra = torch.ones(1)
        task.rows.append(1)
    assert model.values() == before and model.noise is noise
    assert not hasattr(model, "extra") and task.rows == []


def test_unsaved_names_only_what_changes():
    model, task = nn.Linear(1, 1), Buffered.__new__(type("Task", (), {}))
    task.environment, task.names, task.loss = random.Random(1), {"a", "b"}, nn.MSELoss()
    task.rows, task.function = iter([1, 2]), lambda model, batch: None
    carried = CarriedState(model, task, device=CPU)
    assert carried.unsaved() == []
    task.environment.random()
    next(task.rows)
    assert carried.unsaved() == ["task.environment", "task.rows"]


def test_first_checkpoint_names_unsaved_state_once(program, capfd):
    words = [*WORDS, "task.function._target_=memory.Drawing", "train.checkpoint_every_steps=2"]
    words += ["train.num_epochs=1"]
    assert cli.main([*words, "hydra.run.dir=run"]) == 0
    said = capfd.readouterr().out
    assert said.count("`task.function.random` can't be saved") == 1


CENTERED = """
import torch
from torch import nn

class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.center = nn.Linear(4, 3), torch.zeros(4)
    def forward(self, x):
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.square().mean(0)
        return self.layer(x - self.center)
"""


def test_evaluate_has_the_state_of_the_run(own_folder):
    (own_folder / "centers.py").write_text(CENTERED)
    words = ["data=iris", "model._target_=centers.Centered", "train.num_epochs=3", "hydra.run.dir=run", "device=cpu"]
    assert cli.main([*words, "tracking.enabled=false"]) == 0
    expected = json.loads((own_folder / "run/summary.json").read_text())["metrics"]["test/loss"]
    for checkpoint, written in (("run", "evaluation"), ("run/checkpoints/last.pt", "evaluations/last")):
        assert cli.main(["evaluate", checkpoint]) == 0
        evaluation = json.loads((own_folder / f"run/{written}.json").read_text())
        assert evaluation["metrics"]["test/loss"] == expected, written
