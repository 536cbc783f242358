"""The data of plots: a split's rows as the model sees them, and the worst of them."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from simulated import run_simulated
from torch import nn

from runner.experiment.plots import predictions as module
from runner.experiment.plots.draw import draw_boundary
from runner.experiment.plots.predictions import GRID, NUM_SHOWN, collect
from runner.models.preprocessing import Prepared, TableColumns
from runner.tasks.classification import Classification
from runner.tasks.regression import Autoencoding


def rows(count=60, width=2):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=draw), torch.randint(3, (count,), generator=draw)


def batches(inputs, targets, size=25):
    return zip(inputs.split(size), targets.split(size), strict=True)


def test_collected_outputs_match_model_worst_first():
    inputs, targets = rows(width=5)
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(5, 3))
    found = collect(model, Classification(num_classes=3), batches(inputs, targets), split_rows=60, autocast=nullcontext)
    sure = model[1](inputs).softmax(1).detach()
    np.testing.assert_allclose(found.predictions, sure.numpy(), rtol=1e-6)
    assert found.targets.tolist() == targets.tolist()
    order = (1 - sure.gather(1, targets[:, None])[:, 0]).argsort(descending=True)[:NUM_SHOWN]
    np.testing.assert_array_equal(found.worst.inputs, inputs[order].numpy())
    assert found.worst.targets.tolist() == targets[order].tolist()
    assert model.training and found.plane is None


@pytest.mark.parametrize("size", [7, 10, 60])
@pytest.mark.parametrize("most_numbers", [10_000, 30])
def test_collected_rows_are_spread_over_split(monkeypatch, size, most_numbers):
    """Images in a folder are ordered by class. 15 of 60 rows, or 10 with at most 30 numbers."""
    monkeypatch.setattr(module, "MAX_NUMBERS", most_numbers)
    inputs, targets = rows()[0], torch.arange(3).repeat_interleave(20)
    model, split = nn.Linear(2, 3), batches(inputs, targets, size)
    found = collect(model, Classification(num_classes=3), split, split_rows=60, autocast=nullcontext, most_rows=15)
    chosen = slice(None, None, 4 if most_numbers == 10_000 else 8)
    sure = model(inputs).softmax(1).detach()[chosen]
    np.testing.assert_allclose(found.predictions, sure.numpy(), rtol=1e-6)
    assert found.targets.tolist() == targets[chosen].tolist()
    np.testing.assert_array_equal(found.plane.rows, inputs[chosen].numpy())


def test_plane_points_are_spread_over_split(monkeypatch):
    monkeypatch.setattr(module, "MAX_POINTS", 20)
    inputs, targets = rows()
    split = batches(inputs, targets)
    found = collect(nn.Linear(2, 3), Classification(num_classes=3), split, split_rows=60, autocast=nullcontext)
    np.testing.assert_array_equal(found.plane.rows, inputs[::3].numpy())


def test_plane_has_predictions_around_the_rows():
    inputs, targets = rows()
    inputs = inputs * torch.tensor([1.0, 100.0])
    model, task = Prepared(nn.Linear(2, 3), before=nn.BatchNorm1d(2)), Classification(num_classes=3)
    plane = collect(model, task, batches(inputs, targets), split_rows=60, autocast=nullcontext).plane
    assert plane.predictions.shape == (GRID, GRID, 3)
    assert plane.x[0] < inputs[:, 0].min() and plane.y[-1] > inputs[:, 1].max()
    here = torch.tensor([[plane.x[7], plane.y[3]]])
    with torch.no_grad():
        said = task.predictions(model.eval()(here))[0]
    np.testing.assert_allclose(plane.predictions[3, 7], said.numpy(), rtol=1e-5, atol=1e-6)


def test_the_worst_reconstruction_comes_first():
    images = torch.rand(30, 1, 4, 4)
    images[17] += 5
    model = nn.Sequential(nn.Flatten(), nn.Hardtanh(0, 1))
    found = collect(model, Autoencoding(), images.split(5), split_rows=30, autocast=nullcontext)
    np.testing.assert_array_equal(found.worst.inputs[0], images[17].numpy())


def on_a_device(device):
    inputs, targets = rows()
    torch.manual_seed(0)
    model = nn.Linear(2, 3).to(device)
    split = [(part.to(device), true.to(device)) for part, true in batches(inputs, targets)]
    found = collect(model, Classification(num_classes=3), split, split_rows=60, autocast=nullcontext)
    return [found.predictions.tolist(), found.worst.inputs.tolist(), found.plane.predictions[:3].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda:1", "mps"])
def test_on_a_device_that_this_machine_lacks(name):
    assert run_simulated(name, on_a_device) == run_simulated("cpu", on_a_device)


@pytest.mark.parametrize("inputs", [[2.0**62, 1e25], [2.0**62 + 2.0**40, 5.0], [0.0, 1e-30], [float("nan"), 3.0]])
def test_plane_is_drawn_for_any_inputs(inputs, tmp_path):
    points = torch.tensor([inputs] * 20)
    points[0, 0], points[1, 1] = 2.0**62 if inputs[0] > 1 else 0.5, torch.nan
    scaled = TableColumns([0, 0], [0.0, 0.0], [1e25, 1e25], [0.0, 0.0])
    model = Prepared(nn.Linear(2, 2), before=scaled)
    targets = torch.arange(20) % 2
    task = Classification(num_classes=2)
    found = collect(model, task, batches(points, targets), split_rows=60, autocast=nullcontext)
    assert (np.diff(found.plane.x) > 0).all() and (np.diff(found.plane.y) > 0).all()
    assert len(found.plane.rows) == len(found.plane.targets) > 0 and np.isfinite(found.plane.rows).all()
    assert draw_boundary(found) is not None
