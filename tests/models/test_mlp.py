import math

import pytest
import torch
from refused import problems_of
from torch import nn

from runner.errors import RunnerError
from runner.models.mlp import ACTIVATIONS, MLP, activation_class


def test_any_shape_goes_in():
    assert MLP(64, 10)(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert MLP(64, 10)(torch.zeros(1, 64)).shape == (1, 10)


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


def test_the_seed_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return MLP(8, 2).output.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("settings", "asked", "write"),
    [
        ({"activation": "rleu"}, "model.activation=rleu", "model.activation=relu"),
        ({"activation": "ReLu"}, "model.activation=ReLu", "model.activation=relu"),
        ({"activation": "leakyrelu"}, "model.activation=leakyrelu", "model.activation=leaky_relu"),
        ({"activation": "zzz"}, "model.activation=zzz", "model.activation=tanh"),
        ({"activation": None}, "model.activation=None", "model.activation=relu"),
        ({"hidden_sizes": 256}, "model.hidden_sizes=256", "model.hidden_sizes=[256]"),
        ({"hidden_sizes": [0]}, "model.hidden_sizes=[0]", "model.hidden_sizes=[256,256]"),
        ({"dropout": 1}, "model.dropout=1", "model.dropout=0.1"),
    ],
)
def test_what_is_no_mlp(settings, asked, write):
    (problem,) = problems_of(MLP, 4, 2, **settings)
    assert problem.source == asked
    assert write in problem.help


def test_the_choices_are_listed():
    with pytest.raises(RunnerError, match="relu, gelu, silu, tanh, leaky_relu, elu"):
        activation_class("swish")
