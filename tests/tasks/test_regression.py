import math

import pytest
import torch
from refused import problems_of
from torch import nn
from torch.nn import functional as F

from runner.config.checks import argument_problems
from runner.errors import refuse
from runner.tasks.regression import Autoencoding, Regression
from runner.tasks.task import is_predicting


def judged(task, inputs, targets):
    return {name: value.item() for name, value in task(nn.Identity(), (inputs, targets)).items()}


@pytest.mark.parametrize("targets", [torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 3.0])], ids=["(B, 1)", "(B,)"])
@pytest.mark.parametrize("shape", [(2, 1), (2,)])
def test_it_compares_row_with_row(targets, shape):
    assert judged(Regression(), torch.tensor([1.0, 1.0]).reshape(shape), targets) == {"loss": 2.0, "mae": 1.0}


def test_the_losses():
    outputs, targets = torch.tensor([[1.0, 5.0], [1.0, 0.0]]), torch.tensor([[1.5, 1.0], [1.0, 0.0]])
    assert judged(Regression(loss="mae"), outputs, targets)["loss"] == F.l1_loss(outputs, targets).item()
    found = judged(Regression(loss="huber", huber_delta=0.7), outputs, targets)
    assert found["loss"] == pytest.approx(F.huber_loss(outputs, targets, delta=0.7).item())
    assert found["mse"] == pytest.approx(F.mse_loss(outputs, targets).item())


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_gradients_of_scaled_targets_are_the_same_in_each_unit(loss):
    """The loss is in the targets' units, and so is a delta."""
    units = torch.tensor([1e-6, 1e6])
    targets = torch.tensor([[0.5, -1.0], [2.0, 3.0], [0.1, -0.4]])
    outputs = torch.zeros(3, 2, requires_grad=True)
    task = Regression(loss=loss, huber_delta=1e6)
    value = task(nn.Identity(), (outputs * units, targets * units))["loss"]
    task.learn_scaled(units.tolist())
    scaled = task(nn.Identity(), (outputs * units, targets * units))
    assert scaled["loss"].item() == value.item()
    (found,) = torch.autograd.grad(scaled["loss"], outputs)
    learned = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.mse_loss}[loss](outputs, targets)
    (wanted,) = torch.autograd.grad(learned, outputs)
    columns = slice(0, 1) if loss == "huber" else slice(None)  # half a square, within the delta
    torch.testing.assert_close(found[:, columns] * (2 if loss == "huber" else 1), wanted[:, columns])
    with torch.no_grad():
        assert task(nn.Identity(), (outputs * units, targets * units))["loss"].item() == value.item()


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_regression_derives_rmse_and_predicts_rows(loss):
    task = Regression(loss=loss)
    values = judged(task, torch.tensor([[1.0], [4.0]]), torch.tensor([[0.0], [1.0]]))
    assert task.derived(values) == {"rmse": pytest.approx(math.sqrt(5.0))}
    assert is_predicting(task)
    assert task.predictions(torch.zeros(3, dtype=torch.bfloat16)).shape == (3, 1)
    assert task.targets((None, torch.zeros(3))).shape == (3, 1)


def test_an_autoencoder_is_compared_with_its_inputs():
    inputs = torch.rand(2, 1, 4, 4)
    flat = nn.Sequential(nn.Flatten(), nn.ReLU())
    for batch in ((inputs, torch.tensor([1, 2])), inputs, (inputs,)):
        values = Autoencoding()(flat, batch)
        assert {name: value.item() for name, value in values.items()} == {"loss": 0.0, "mae": 0.0}
    task = Autoencoding(loss="mae")
    found = task(nn.Sequential(nn.Flatten(), nn.Hardtanh(0, 0.5)), inputs)
    assert found["loss"].item() == pytest.approx((inputs - inputs.clamp(max=0.5)).abs().mean().item())
    assert is_predicting(task)
    assert task.predictions(inputs).shape == task.targets(inputs).shape == (2, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Regression(num_classes=3),
        lambda: refuse(argument_problems(Regression, {"loss": "msa", "huber_delta": 0}, "task")),
        lambda: Regression(plots=["roc"]),
        lambda: Autoencoding(vocab_size=50),
        lambda: Regression()(nn.Identity(), (torch.zeros(2, 3), torch.zeros(2, 2))),
        lambda: Autoencoding()(nn.Linear(4, 3), torch.zeros(2, 4)),
        lambda: Autoencoding()(nn.Identity(), torch.zeros(2, 4, dtype=torch.int64)),
    ],
    ids=range(7),
)
def test_unsuitable_data_and_models_are_refused(make, messages):
    messages(problems_of(make))


@pytest.mark.parametrize("shape", [(1,), (2, 3), ()])
def test_what_is_told_can_be_exported_for_any_number_of_rows(shape):
    class Told(nn.Module):
        def forward(self, outputs):
            return Regression().predictions(outputs * 2)

    rows = {0: torch.export.Dim("rows")}
    told = torch.export.export(Told(), (torch.rand(3, *shape),), dynamic_shapes=(rows,)).module()
    outputs = torch.rand(5, *shape)
    torch.testing.assert_close(told(outputs), 2 * outputs.reshape(5, -1))
