import math

import pytest
import torch
from torch import nn

from runner.models.cnn import CNN

#: the outputs of the network for images before it supported signals
BEFORE = [-0.061774, 1.006153, 3.737699, -0.611828, 0.691824, 3.947630, 0.952160, -4.189527, 0.514466, 0.531589]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 4, 4), (2, 5, 9), (4, 28, 7)])
def test_images_of_any_size(shape):
    model = CNN(shape, 10)
    assert model(torch.zeros(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize("shape", [(1, 40), (3, 4), (2, 9)])
def test_signals_of_any_length(shape):
    model = CNN(shape, 10, kernel_size=5)
    assert model(torch.zeros(3, *shape)).shape == (3, 10)
    assert {type(layer) for layer in model.blocks} == {nn.Conv1d, nn.BatchNorm1d, nn.ReLU, nn.MaxPool1d}


def test_image_weights_are_fixed_by_the_seed():
    torch.manual_seed(0)
    model = CNN((1, 8, 8), 10)
    outputs = model(torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8)).sum(0)
    assert outputs.tolist() == pytest.approx(BEFORE, abs=1e-5)


def test_batch_of_one_row_is_trained_on():
    model = CNN([1, 4, 4], 3)
    model(torch.randn(1, 1, 4, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_spread_of_the_weights():
    torch.manual_seed(0)
    model = CNN([1, 8, 8], 400, [64, 128])
    second = model.blocks[3]
    assert second.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)
    assert model.output.weight.std().item() == pytest.approx(1 / math.sqrt(128), rel=0.02)
    assert 0.05 < model(torch.randn(64, 1, 8, 8)).std() < 3
