"""A user's function as the task: named in YAML, checked, and refused if it would fail silently."""

from functools import partial

import pytest
import torch
from refused import problems_of
from torch import nn

from runner import cli
from runner.config.instantiate import build
from runner.tasks.checks import trains_nothing
from runner.tasks.custom import Own
from runner.tracking.journal_reader import read_points

MODEL, BATCH = nn.Identity(), (torch.ones(2, 1), torch.zeros(2, 1))


def loss(model, batch, scale=1.0):
    return {"error": (model(batch[0]) - batch[1]).abs().mean(), "loss": model(batch[0]).mean() * scale}


class Weighed(nn.Module):
    def __init__(self, learns=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=learns)

    def forward(self, model, batch):
        return model(batch[0]).mean() * self.weight


def test_the_loss_comes_first_and_alone_it_is_enough():
    assert list(Own(loss)(MODEL, BATCH)) == ["loss", "error"]
    assert Own(partial(loss, scale=3.0))(MODEL, BATCH)["loss"].item() == 3.0
    task = Own(Weighed(learns=False))
    assert list(task(MODEL, BATCH)) == ["loss"]
    assert [name for name, _ in task.named_parameters()] == ["function.weight"], "placed with the task"


@pytest.mark.parametrize(
    "make",
    [
        lambda: trains_nothing(Own(Weighed())),
        lambda: trains_nothing(Weighed()),
        lambda: Own("my_tasks.loss"),
        lambda: Own(partial(Weighed)),
        lambda: Own(torch.ones(())),
        lambda: Own(lambda model, batch: None)(MODEL, BATCH),
        lambda: Own(lambda model, batch: {"cost": torch.ones(())})(MODEL, BATCH),
        lambda: Own(lambda model, batch: {"loss": 1.0})(MODEL, BATCH),
        lambda: Own(lambda model, batch: batch[0])(MODEL, BATCH),
    ],
    ids=range(9),
)
def test_unusable_functions_are_refused(make, messages):
    messages(problems_of(make))


def test_it_is_built_from_yaml(own_folder):
    (own_folder / "my_tasks.py").write_text(
        "def loss(model, batch, scale=1.0):\n    return model(batch[0]).mean() * scale\n"
    )
    function = {"_target_": "my_tasks.loss", "_partial_": True, "scale": 2.0}
    task = build({"_target_": "runner.tasks.Own", "function": function}, key="task")
    assert task(MODEL, BATCH)["loss"].item() == 2.0


def test_run_gives_function_its_targets_unchanged(own_folder, capsys):
    """Targets (N, 1) would broadcast against outputs (N,), and the loss would remain at the variance."""
    (own_folder / "sums.py").write_text(
        "import torch\n"
        "from torch.nn.functional import mse_loss\n"
        "def data():\n"
        "    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))\n"
        "    return x, x.sum(1)\n"
        "def loss(model, batch):\n"
        "    assert batch[1].dim() == 1\n"
        "    loss = mse_loss(model(batch[0]).squeeze(-1), batch[1])\n"
        "    return {'loss': loss, 'twice': 2 * loss}\n"
    )
    words = ["data._target_=sums.data", "task=own", "model=linear", "train.num_epochs=1", "tracking.enabled=false"]
    assert cli.main([*words, "task.function._target_=sums.loss", "hydra.run.dir=run"]) == 0
    points = read_points(own_folder / "run")
    assert points["val/twice"][0][1] == pytest.approx(2 * points["val/loss"][0][1])
    assert cli.main(["evaluate", "run"]) == 0
    assert cli.main(words) == 2
    assert "task.function._target_=..." in capsys.readouterr().err
