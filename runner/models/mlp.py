"""A multi-layer perceptron, for a batch of anything: (B, ...) to (B, out_features)."""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor, nn

from runner.config.checks import Share, Widths, one_of
from runner.models.linear import flat

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}
Activation = Annotated[str, one_of(ACTIVATIONS)]


class MLP(nn.Module):
    """Linear layers with an activation and optional dropout between them. No hidden sizes: a linear map.

    Kaiming-normal weights in the hidden layers (He et al. 2015; gain 5/3 for tanh, else that of relu), LeCun-normal
    ones at the output, so that all activations start with a standard deviation of about 1; zero biases.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden_sizes: Widths = (256,),
        *,
        activation: Activation = "relu",
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        make = ACTIVATIONS[activation]
        gain = 5 / 3 if activation == "tanh" else math.sqrt(2)
        layers: list[nn.Module] = []
        size = in_features
        for width in hidden_sizes:
            layers += [_linear(size, width, gain=gain), make()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            size = width
        self.hidden = nn.Sequential(*layers)
        self.output = _linear(size, out_features, gain=1.0)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, out_features)
        output: Tensor = self.output(self.hidden(flat(inputs, self.output.weight.dtype)))
        return output


def _linear(inputs: int, outputs: int, *, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    nn.init.zeros_(layer.bias)
    return layer
