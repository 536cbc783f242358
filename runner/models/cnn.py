"""A batch of images goes in, (B, C, H, W); a small convolutional network's outputs come out, (B, out_features)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runner.errors import Fault, RunnerError


class CNN(nn.Module):
    """Blocks of two 3x3 convolutions with BatchNorm and ReLU, each halving the image, then the mean over what is left.

    Kaiming-normal weights (He et al. 2015). input_shape: (C, H, W); each block needs at least 2 pixels a side.
    """

    def __init__(
        self, input_shape: Sequence[int], out_features: int, channels: Sequence[int] = (32, 64), dropout: float = 0.0
    ) -> None:
        super().__init__()
        least = 2 ** len(channels)
        if len(input_shape) != 3 or min(input_shape[1:]) < least:
            asked = f"model=cnn on inputs of shape {tuple(input_shape)}"
            so = f"it takes images (channels, height, width) of {least} pixels a side or more"
            raise RunnerError(Fault(asked, so, "model=mlp, or fewer model.channels, or inputs of that shape"))
        blocks: list[nn.Module] = []
        size = input_shape[0]
        for width in channels:
            blocks += [*_convolution(size, width), *_convolution(width, width), nn.MaxPool2d(2)]
            size = width
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(size, out_features)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, H, W) -> (B, out_features)
        output: Tensor = self.output(self.dropout(self.blocks(inputs).mean((2, 3))))
        return output


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)  # BatchNorm brings the bias
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer, nn.BatchNorm2d(outputs), nn.ReLU()
