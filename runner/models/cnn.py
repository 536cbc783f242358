"""A small convolutional network for images or signals: (B, C, H, W) or (B, C, L) to (B, out_features)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from torch import Tensor, nn

from runner.config.checks import Check, Share, Widths
from runner.errors import RunnerError
from runner.models.shapes import IMAGES, SIGNALS, check_shape

#: by the number of spatial dimensions: convolution, normalization, pooling
LAYERS: dict[int, tuple[Any, Any, Any]] = {
    1: (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d),
    2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d),
}
ODD = Check(lambda value: type(value) is int and value % 2 == 1 and value > 0, "an odd whole number, 1 or more", "3")


class CNN(nn.Module):
    """Blocks of two convolutions with BatchNorm and ReLU, each halving the image, then the mean over positions.

    Kaiming-normal weights (He et al. 2015); LeCun-normal ones and zero biases at the output.

    Args:
        input_shape: (C, H, W), or (C, L) for signals; sides of at least 2 ** len(channels).
        kernel_size: Odd, so that a convolution keeps the size.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        out_features: int,
        channels: Widths = (32, 64),
        *,
        kernel_size: Annotated[int, ODD] = 3,
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        _check_shape(input_shape, least=2 ** len(channels))
        num_dims = len(input_shape) - 1
        blocks: list[nn.Module] = []
        size = input_shape[0]
        for width in channels:
            blocks += _convolution(num_dims, size, width, kernel_size)
            blocks += [*_convolution(num_dims, width, width, kernel_size), LAYERS[num_dims][2](2)]
            size = width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(size, out_features)
        nn.init.kaiming_normal_(self.output.weight, nonlinearity="linear")
        nn.init.zeros_(self.output.bias)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, H, W) or (B, C, L) -> (B, out_features)
        maps = self.blocks(inputs)
        output: Tensor = self.output(self.dropout(maps.mean(tuple(range(2, maps.dim())))))
        return output


def _check_shape(shape: Sequence[int], *, least: int) -> None:
    source = f"model=cnn on inputs of shape {tuple(shape)}"
    check_shape(shape, model="cnn", takes=[IMAGES, SIGNALS])
    if min(shape[1:]) < least:
        side = "a side" if len(shape) == 3 else "a length"
        problem = (
            f"each entry of `model.channels` but the first halves the input, which needs {side} of at least {least}"
        )
        raise RunnerError.of(source, problem, "use `model=mlp`, or a shorter list in `model.channels`")


def _convolution(num_dims: int, inputs: int, outputs: int, kernel_size: int) -> tuple[nn.Module, ...]:
    convolution, norm, _ = LAYERS[num_dims]
    layer = convolution(inputs, outputs, kernel_size, padding=kernel_size // 2, bias=False)  # the norm brings the bias
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer, norm(outputs), nn.ReLU()
