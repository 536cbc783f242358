"""The rows that cause a value that is not finite."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from runner.device import backends
from runner.tools.explain.blame import blame

CPU = torch.device("cpu")


def hidden(model, batch):
    """exp() overflows for a row, and torch.where() hides that from the loss."""
    large = model(batch)
    return {"loss": torch.where(large < 80, large.exp(), 1.0).mean()}


def shown(model, batch):
    return {"loss": model(batch).exp().mean()}


@pytest.mark.parametrize(("task", "loss"), [(hidden, 1.0), (shown, float("inf"))])
def test_explain_names_row(task, loss):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    rows = torch.zeros(16, 1)
    rows[5] = 1000.0
    parts = SimpleNamespace(
        model=model, task=task, optimizer=None, device=CPU, precision=SimpleNamespace(autocast=nullcontext)
    )
    moment = SimpleNamespace(parts=parts, reached=SimpleNamespace(batches=[rows]))
    origin = SimpleNamespace(phase="forward", rows_not_finite=(torch.arange(16) == 5))
    found = blame(moment, origin, backends.generator_states(CPU), loss=loss)
    assert (found.rows, found.is_sure) == ((5,), True)
