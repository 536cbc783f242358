import math

import pytest
import torch
from torch import nn

from runner.models.linear import Linear
from runner.models.mlp import ACTIVATIONS, MLP


def test_the_layers_are_as_told():
    model = MLP(64, 10, [32, 16], activation="gelu", dropout=0.5)
    assert [type(layer) for layer in model.hidden] == [nn.Linear, nn.GELU, nn.Dropout] * 2
    assert sum(parameter.numel() for parameter in model.parameters()) == 65 * 32 + 33 * 16 + 17 * 10
    assert not any(isinstance(layer, nn.Dropout) for layer in MLP(64, 10, [32]).hidden)


def test_no_hidden_sizes_make_a_linear_map():
    model = MLP(6, 2, [])
    a, b = torch.randn(2, 1, 6)
    torch.testing.assert_close(model(a + b), model(a) + model(b))
    assert sum(parameter.numel() for parameter in model.parameters()) == 14


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_signals_keep_their_spread_through_many_layers(activation):
    torch.manual_seed(0)
    outputs = MLP(512, 64, [512] * 6, activation=activation)(torch.randn(256, 512))
    assert 0.2 < outputs.std() < 3


def test_the_spread_of_the_weights():
    torch.manual_seed(0)
    for activation, gain in (("relu", math.sqrt(2)), ("tanh", 5 / 3)):
        model = MLP(1000, 400, [900], activation=activation)
        assert model.hidden[0].weight.std().item() == pytest.approx(gain / math.sqrt(1000), rel=0.01)
        assert model.output.weight.std().item() == pytest.approx(1 / math.sqrt(900), rel=0.01)
        assert model.hidden[0].bias.abs().max() == model.output.bias.abs().max() == 0


def test_any_shape_becomes_one_linear_map():
    model = Linear(12, 3)
    with torch.no_grad():
        model.output.weight.copy_(torch.arange(36.0).reshape(3, 12))
        model.output.bias.fill_(1)
    x = torch.randn(5, 3, 2, 2)
    torch.testing.assert_close(model(x), x.reshape(5, 12) @ torch.arange(36.0).reshape(3, 12).T + 1)


def test_it_starts_with_every_class_equally_likely():
    assert Linear(4, 3)(torch.randn(5, 4)).abs().max() == 0
