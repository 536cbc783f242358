import pytest
import torch
from torch import nn

from runner.tasks.classification import Classification
from runner.tasks.regression import Regression


def test_classification_is_cross_entropy_and_the_part_that_is_right():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    targets = torch.tensor([0, 1, 1])
    values = Classification()(nn.Identity(), (logits, targets))
    assert values["loss"].item() == pytest.approx(nn.functional.cross_entropy(logits, targets).item())
    assert values["accuracy"].item() == pytest.approx(2 / 3)


def test_label_smoothing_is_passed_on():
    logits, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    values = Classification(label_smoothing=0.2)(nn.Identity(), (logits, targets))
    assert values["loss"].item() == pytest.approx(
        nn.functional.cross_entropy(logits, targets, label_smoothing=0.2).item()
    )


@pytest.mark.parametrize("targets", [torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 3.0])], ids=["(B, 1)", "(B,)"])
def test_regression_compares_row_with_row(targets):
    values = Regression()(nn.Identity(), (torch.tensor([[1.0], [1.0]]), targets))
    assert (values["loss"].item(), values["mae"].item()) == (2.0, 1.0)
