"""A batch of images goes in, (B, C, H, W); a small convolutional network's outputs come out, (B, out_features)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runner.errors import Fault, RunnerError
from runner.models.sizes import probability, widths


class CNN(nn.Module):
    """Blocks of two 3x3 convolutions with BatchNorm and ReLU, each halving the image, then the mean over what is left.

    Kaiming-normal weights (He et al. 2015); LeCun-normal ones and zero biases at the output. input_shape: (C, H, W),
    whose sides need 2 pixels for each time they are halved: 2 ** len(channels).
    """

    def __init__(
        self, input_shape: Sequence[int], out_features: int, channels: Sequence[int] = (32, 64), *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        dropout = probability(dropout, key="model.dropout")
        channels = widths(channels, key="model.channels", example="[32,64]")
        _check_shape(input_shape, least=2 ** len(channels))
        blocks: list[nn.Module] = []
        size = input_shape[0]
        for width in channels:
            blocks += [*_convolution(size, width), *_convolution(width, width), nn.MaxPool2d(2)]
            size = width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(size, out_features)
        nn.init.kaiming_normal_(self.output.weight, nonlinearity="linear")
        nn.init.zeros_(self.output.bias)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, H, W) -> (B, out_features)
        output: Tensor = self.output(self.dropout(self.blocks(inputs).mean((2, 3))))
        return output


def _check_shape(shape: Sequence[int], *, least: int) -> None:
    asked = f"model=cnn on inputs of shape {tuple(shape)}"
    if len(shape) == 2:
        so = "it takes images of shape (channels, height, width), and these have no channels"
        raise RunnerError(Fault(asked, so, "the inputs saved as x[:, None], or model=mlp"))
    if len(shape) != 3:
        so = "it takes images of shape (channels, height, width)"
        raise RunnerError(Fault(asked, so, "model=mlp, which takes any shape, or inputs that are images"))
    if min(shape[1:]) < least:
        so = f"its channels halve the image until a side of {least} pixels is 1, and these sides are shorter"
        raise RunnerError(Fault(asked, so, "model=mlp, or a shorter list in model.channels"))


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)  # BatchNorm brings the bias
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer, nn.BatchNorm2d(outputs), nn.ReLU()
