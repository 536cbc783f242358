"""The learning-rate range test: the suggestion for known curves, and `python -m runner lr-find`."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refused import problems_of
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

from runner.device import backends
from runner.tools.lr_find import _groups, smoothed, suggest

RATES = np.geomspace(1e-6, 10, 141)  # 20 per decade


def curve(*, falls=1e-3, rises=1.0):
    """Return a loss that falls with the rate's logarithm from 2 to 1 around `falls`, and rises from `rises` on."""
    return 2 - 1 / (1 + (falls / RATES) ** 2) + (RATES / rises) ** 3


def test_lr_find_suggests_below_steepest_point():
    found = suggest(RATES, curve())
    assert 1e-3 < found.steepest < 3e-3  # a running mean lags
    assert found.lowest / 10 == found.tenth_of_lowest
    assert found.suggested == min(found.steepest, found.tenth_of_lowest)
    assert "run away" in found.ending and found.rates[-1] < RATES[-1]


def test_lr_find_ignores_values_after_nan():
    losses = curve()
    losses[100:] = 0.0
    losses[100] = np.nan
    found = suggest(RATES, losses)
    assert len(found.rates) == 100 and "nan" in found.ending


def test_noise_does_not_move_it_far():
    noise = np.random.default_rng(0).normal(size=RATES.shape) * 0.05
    assert 3e-4 < suggest(RATES, curve() + noise).steepest < 1e-2


@pytest.mark.parametrize("losses", [np.linspace(1, 2, 141), np.full(141, np.nan), np.r_[2.0, np.full(140, np.inf)]])
def test_loss_that_never_falls_is_reported(losses, messages):
    messages(problems_of(suggest, RATES, losses))


def test_running_mean_begins_with_first_value():
    assert smoothed(np.full(5, 3.0)) == pytest.approx([3.0] * 5)
    assert smoothed(np.array([1.0, 2.0])) == pytest.approx([1.0, (0.9 * 0.1 + 0.2) / 0.19])


def parameters(num):
    return [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(num)]


def groups_of(optimizer):
    return _groups(SimpleNamespace(optimizer=optimizer))


def test_groups_with_separate_rate_keep_it():
    one, other = ({"params": parameters(1)} for _ in range(2))
    optimizer = SGD([one, {**other, "lr": 1.0}], lr=0.01)
    LinearLR(optimizer, start_factor=0.1)
    assert groups_of(optimizer) == optimizer.param_groups[:1]


def test_schedule_sets_all_group_rates():
    optimizer = SGD([{"params": parameters(1)}, {"params": parameters(1), "weight_decay": 0.1}], lr=0.01)
    OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    assert groups_of(optimizer) == optimizer.param_groups


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """The current directory is empty, and not the one that the command writes to."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


WORDS = ["model=mlp", "model.hidden_sizes=[16]", "device=cpu", "data.limit=400", "train.batch_size=32"]


def test_lr_find_leaves_plot_and_no_run(run, tmp_path):
    before = set(Path().iterdir())
    words = [*WORDS, "train.accumulate_steps=2", "--steps", "60"]
    code, out, _ = run("lr-find", *words, f"hydra.run.dir={tmp_path}/lr")
    assert code == 0 and "take    optimizer.lr=" in out
    code, out, _ = run("lr-find", *words, f"hydra.run.dir={tmp_path}/again", "--json")
    assert code == 0 and json.loads(out)["losses"] == json.loads((tmp_path / "lr/lr_find.json").read_text())["losses"]
    assert {path.name for path in (tmp_path / "lr").iterdir()} == {"lr_find.json", "lr_find.png"}
    assert {path.name for path in set(Path().iterdir()) - before} <= {"__pycache__"}  # no mlflow.db
    found = json.loads((tmp_path / "lr/lr_find.json").read_text())
    assert len(found["rates"]) == len(found["losses"]) == found["num_steps"] <= 60
    assert found["rates"][0] == pytest.approx(1e-7) and 1e-4 < found["suggested"] < 1


def test_it_stops_where_the_loss_runs_away(run, tmp_path):
    """At a rate of a million, the loss diverges at once: most of the steps are not taken."""
    words = [*WORDS, "optimizer=sgd", f"hydra.run.dir={tmp_path}/lr", "--json", "--steps", "400", "--to", "1e9"]
    code, out, _ = run("lr-find", *words, "--from", "1e-4")
    assert code == 0
    found = json.loads(out)
    assert (
        found["num_steps"] < 400
        and found["rates"][0] == pytest.approx(1e-4)
        and "to the highest rate" not in found["ending"]
    )


def test_the_device_is_read_in_batches_only(run, tmp_path, monkeypatch):
    from runner.training.metric_buffer import MetricBuffer

    pulls, threads = [], []
    monkeypatch.setattr(backends, "use_in_thread", threads.append)
    pull = MetricBuffer.pull
    monkeypatch.setattr(MetricBuffer, "pull", lambda self, **given: (pulls.append(self.step), pull(self, **given))[1])
    code, _, _ = run("lr-find", *WORDS, f"hydra.run.dir={tmp_path}/lr", "--steps", "50", "--to", "0.1")
    assert code == 0
    assert pulls == [10, 20, 30, 40, 50, 50]
    assert threads == [torch.device("cpu")]
