"""What is asked of a trial: its sizes are those of the batches that the run has."""

import time
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from runner.data.own_loader import OwnLoader
from runner.plan.worker import _is_own, _largest, _recomputed


@pytest.fixture
def trial():
    """Of a DataLoader with batches of 96 rows, each of which takes a byte; its model has blocks that are alike."""
    model = torch.nn.Sequential()
    model.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(3))
    settings = {"batch_size": 32, "precision": "fp32", "recompute": [], "compile": False, "cuda_graph": False}
    asked = []
    return SimpleNamespace(
        cfg=OmegaConf.create({"train": settings}),
        parts=SimpleNamespace(model=model),
        rows_trained=96,
        device=torch.device("cpu"),
        asked=asked,
        peak_bytes=lambda size, precision: asked.append(size) or size,
    )


def test_the_search_begins_with_the_size_of_a_persons_own_loader(trial):
    found = _largest(trial, {"precisions": ["fp32"], "usable_bytes": 96}, deadline=time.monotonic() + 60)
    assert trial.asked[0] == 96 and found == {"fp32": 96}


def test_what_is_recomputed_is_told_by_the_size_of_a_persons_own_loader(trial):
    assert _recomputed(trial, 50) is None
    assert trial.asked == [96]


def test_a_loader_and_not_a_dataset_has_a_size_of_its_own():
    rows = TensorDataset(torch.zeros(4, 2))
    assert [
        _is_own(each) for each in (OwnLoader(DataLoader(rows), asked=""), OwnLoader(rows, asked=""), rows, None)
    ] == [
        True,
        False,
        False,
        False,
    ]
