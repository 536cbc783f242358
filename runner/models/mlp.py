"""A multi-layer perceptron, for a batch of anything: (B, ...) to (B, out_features)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from runner.config.checks import choice, probability, widths
from runner.models.linear import flat

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}


class MLP(nn.Module):
    """Linear layers with an activation and optional dropout between them. No hidden sizes: a linear map.

    Kaiming-normal weights in the hidden layers (He et al. 2015; gain 5/3 for tanh, else that of relu), LeCun-normal
    ones at the output, so that all activations start with a standard deviation of about 1; zero biases.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden_sizes: Sequence[int] = (256,),
        *,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        make = activation_class(activation)
        gain = 5 / 3 if activation == "tanh" else math.sqrt(2)
        dropout = probability(dropout, key="model.dropout")
        layers: list[nn.Module] = []
        size = in_features
        for width in widths(hidden_sizes, key="model.hidden_sizes", example="[256,256]"):
            layers += [_linear(size, width, gain=gain), make()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            size = width
        self.hidden = nn.Sequential(*layers)
        self.output = _linear(size, out_features, gain=1.0)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, out_features)
        output: Tensor = self.output(self.hidden(flat(inputs, self.output.weight.dtype)))
        return output


def activation_class(name: str) -> type[nn.Module]:
    """Return the module class of an activation. Raises: RunnerError with the nearest name."""
    return ACTIVATIONS[choice(name, ACTIVATIONS, key="model.activation")]


def _linear(inputs: int, outputs: int, *, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    nn.init.zeros_(layer.bias)
    return layer
