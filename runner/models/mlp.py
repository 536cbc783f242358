"""A batch of anything goes in, (B, ...); a multi-layer perceptron's outputs come out, (B, out_features)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runner.errors import Fault, RunnerError, nearest

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}


class MLP(nn.Module):
    """Linear layers with an activation, and dropout where asked, between them. No hidden sizes: a linear map.

    Kaiming-normal weights (He et al. 2015) in the hidden layers, small ones at the output, zero biases.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden_sizes: Sequence[int] = (256,),
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        make = activation_class(activation)
        if any(size < 1 for size in hidden_sizes):
            raise RunnerError(
                Fault(f"model.hidden_sizes={list(hidden_sizes)}", "a width is 1 or more", "model.hidden_sizes=[256]")
            )
        if not 0 <= dropout < 1:
            raise RunnerError(Fault(f"model.dropout={dropout}", "it is 0 or more and less than 1", "model.dropout=0.1"))
        layers: list[nn.Module] = []
        size = in_features
        for width in hidden_sizes:
            layers += [_linear(size, width), make()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            size = width
        self.hidden = nn.Sequential(*layers)
        self.output = nn.Linear(size, out_features)
        nn.init.normal_(self.output.weight, std=size**-0.5)
        nn.init.zeros_(self.output.bias)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, out_features)
        output: Tensor = self.output(self.hidden(inputs.flatten(1)))
        return output


def activation_class(name: str) -> type[nn.Module]:
    """The module class of an activation's name. Raises: RunnerError with the nearest one."""
    if name not in ACTIVATIONS:
        write = " or ".join(f"model.activation={hit}" for hit in nearest(name, ACTIVATIONS) or ACTIVATIONS)
        raise RunnerError(
            Fault(f"model.activation={name}", f"there is no such one; there are {', '.join(ACTIVATIONS)}", write)
        )
    return ACTIVATIONS[name]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer
