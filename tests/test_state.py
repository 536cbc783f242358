"""What a checkpoint holds of where a training stands comes back, every number of it."""

from dataclasses import fields
from types import SimpleNamespace

import torch
from torch import nn

from runner.backends import precision
from runner.background import Background
from runner.checkpoint import Keeper, save
from runner.loop import Best, Progress
from runner.metrics import MetricBuffer
from runner.ranks.group import Alone
from runner.state import best_state, take_up, whole_state

CPU = torch.device("cpu")


def test_every_number_of_the_progress_comes_back(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = SimpleNamespace(
        device=CPU,
        model=model,
        kept_model=model,
        average=None,
        optimizer=optimizer,
        schedule=None,
        precision=precision("fp32", device=CPU),
        shards=None,
    )
    best = Best("val/loss", "min", value=0.5, step=10)
    stood = Progress(best, step=33, epoch=3, measured=30, rate=0.1, epochs_without_best=2, num_pieces=4, seconds=7.5)
    untouched = Progress(Best("", ""))
    assert all(getattr(stood, field.name) != getattr(untouched, field.name) for field in fields(Progress))
    background = Background()
    buffer = MetricBuffer(CPU, lambda window: None, background=background, pull_every=10)
    save(
        whole_state(parts, stood, buffer, Alone()) | {"seconds": stood.seconds, "experiment": {}}, tmp_path / "last.pt"
    )
    save(best_state(parts, stood), tmp_path / "best.pt")
    found = Progress(Best("val/loss", "min"))
    take_up(parts, found, Keeper(tmp_path, background), buffer, Alone(), experiment={})
    background.close()
    assert found == stood
