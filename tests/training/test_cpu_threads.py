"""The number of CPU threads of a run, chosen by the work of its steps."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from runner import cli
from runner.device import backends
from runner.training.cpu_threads import flops_a_product, threads_worth


@pytest.mark.parametrize(
    ("flops", "most", "threads"),
    [(0.2e6, 8, 1), (2.4e6, 8, 1), (2.6e6, 8, 2), (2.6e6, 1, 1), (5.1e6, 8, 4), (400e6, 8, 8), (400e6, 1, 1)],
)
def test_additional_thread_only_with_enough_work(flops, most, threads):
    assert threads_worth(flops, most=most) == threads


def task(model, batch):
    return {"loss": model(batch[0]).mean()}


def counted(model, *shape, task=task):
    return flops_a_product(task, model, (torch.rand(shape), torch.zeros(shape[0])), autocast=nullcontext)


class Tokens(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(16, 32, batch_first=True)

    def forward(self, inputs):
        return self.inner(inputs)[0]


class Refuses(nn.Module):
    def forward(self, inputs):
        raise ValueError("not these")


@pytest.mark.parametrize("rows", [3, 8, 128])
def test_all_rows_count(rows):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    assert counted(model, rows, 64) == pytest.approx(2 * rows * (64 * 128 + 128 * 10) / 2)
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    assert counted(convolution, rows, 3, 16, 16) == pytest.approx(2 * rows * 16 * 16 * 8 * 27)


def test_recurrent_time_steps_are_separate_products():
    at_once = 2 * 128 * 16 * 4 * 32
    assert counted(Tokens(nn.LSTM), 128, 20, 16) < 2 * at_once + 2 * 128 * 32 * 4 * 32
    # all time steps multiply the inputs' weights in one product
    assert counted(Tokens(nn.GRU), 128, 20, 16) < 20 * at_once / 4


def test_what_cannot_be_counted():
    assert counted(nn.ReLU(), 8, 4) is None
    assert counted(Refuses(), 8, 4) is None
    assert counted(nn.Linear(5, 1), 8, 4) is None


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return self.layers(inputs)


def test_nothing_remembers_it():
    model, batch = Remembers(), (torch.rand(8, 4), None)
    states = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert flops_a_product(task, model, batch, autocast=nullcontext) == 2 * 8 * 4 * 4
    assert model.calls == 0 and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states)


ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return torch.full((64,), float(index)), index % 10
"""
RUN = ("device=cpu", "tracking.enabled=false", "train.num_epochs=1", "data.limit=300", "task.plots=false", "model=mlp")


@pytest.mark.parametrize(
    ("words", "said", "threads"),
    [
        (["model.hidden_sizes=[16]"], "1 of 2 threads (auto: 0.152 MFLOP a product)", 1),
        (["model.hidden_sizes=[16]", "backends.cpu.num_threads=2"], "", 2),
        (["model.hidden_sizes=[512,512]", "data.residency=stream"], "2 of 2 threads (auto: ", 2),
        (["model.out_features=10", "data=own", "data.num_workers=1"], "", 1),
    ],
)
def test_a_run_says_it_and_takes_them(words, said, threads, own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    (own_folder / "own_rows.py").write_text(ROWS)
    (own_folder / "conf" / "data").mkdir(parents=True)
    (own_folder / "conf" / "data" / "own.yaml").write_text("_target_: own_rows.Rows\n")
    monkeypatch.setattr(backends, "THREADS", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # respected if it is set
    assert cli.main([*RUN, *words, "hydra.run.dir=run"]) == 0
    log = (own_folder / "run/runner.log").read_text()
    model = next(line for line in log.splitlines() if " - model  " in line)
    assert said in model and ("threads" in model) is bool(said)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("given", "counts"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["nothing", "a count", "a policy"],
)
def test_waiting_threads_sleep_soon_unless_set(given, counts):
    code = "import runner.__main__, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**others, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [counts, "False"]
