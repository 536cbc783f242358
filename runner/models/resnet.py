"""A residual network for a batch of images: (B, C, H, W) to (B, out_features)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

from torch import Tensor, nn

from runner.config.checks import Check, Count, one_of
from runner.models.shapes import IMAGES, check_shape

#: blocks in each stage of the networks for large images, and whether they are bottlenecks (He et al. 2015, table 1)
STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
DEPTH = Check(
    lambda depth: type(depth) is int and (depth in STAGES or (depth >= 8 and depth % 6 == 2)),
    "18, 34, 50, 101, 152, or 6n + 2 for small images: 20, 32, 44, 56, 110",
    "18",
)
#: a bottleneck's outputs, in widths of its 3x3 convolution
EXPANSION = 4
#: images whose shorter side is below this many pixels keep their size at the stem
SMALL_SIDE = 96


class ResNet(nn.Module):
    """Stages of residual blocks, each halving the image and doubling the channels, then the mean over positions.

    Kaiming-normal weights; the last BatchNorm of each block starts at zero, so that a block starts as its shortcut (Goyal et
    al. 2017).

    Args:
        depth: 18, 34 (basic blocks), 50, 101 or 152 (bottlenecks): four stages from width 64; or 6n + 2, e.g., 20, 32, 44,
            56 or 110, for CIFAR: three stages of n basic blocks from width 16 (He et al. 2015).
        width: Of the first stage; None: by the depth.
        stem: `imagenet`, a strided 7x7 convolution and pooling, divides the sides by four; `cifar`, a 3x3 convolution,
            keeps them; `auto` is `cifar` below 96 pixels.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        out_features: int,
        depth: Annotated[int, DEPTH] = 18,
        *,
        width: Count | None = None,
        stem: Annotated[str, one_of(("auto", "cifar", "imagenet"))] = "auto",
    ) -> None:
        super().__init__()
        stages, is_bottleneck = _stages(depth)
        check_shape(input_shape, model="resnet", takes=[IMAGES])
        if stem == "auto":
            stem = "cifar" if min(input_shape[1:]) < SMALL_SIDE else "imagenet"
        size = width or (64 if len(stages) == 4 else 16)
        self.stem = _stem(input_shape[0], size, stem)
        inputs = size
        blocks: list[nn.Module] = []
        for stage, num_blocks in enumerate(stages):
            outputs = size * 2**stage * (EXPANSION if is_bottleneck else 1)
            for index in range(num_blocks):
                blocks.append(
                    ResidualBlock(inputs, outputs, 2 if stage and not index else 1, is_bottleneck=is_bottleneck)
                )
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(inputs, out_features)
        _initialise(self)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, H, W) -> (B, out_features)
        output: Tensor = self.output(self.blocks(self.stem(inputs)).mean((2, 3)))
        return output


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; as a bottleneck a 3x3 between two 1x1, which reduce and expand the channels."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, is_bottleneck: bool) -> None:
        super().__init__()
        sizes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        if is_bottleneck:
            width = outputs // EXPANSION
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        layers = [layer for size in sizes for layer in (*_convolution(*size), nn.ReLU(inplace=True))]
        self.path = nn.Sequential(*layers[:-1])
        unchanged = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if unchanged else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = (self.path(inputs) + self.shortcut(inputs)).relu()
        return outputs


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)


def _stem(inputs: int, width: int, kind: str) -> nn.Sequential:
    if kind == "cifar":
        return nn.Sequential(*_convolution(inputs, width, 3), nn.ReLU(inplace=True))
    return nn.Sequential(*_convolution(inputs, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))


def _initialise(model: ResNet) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, ResidualBlock):
            nn.init.zeros_(cast(nn.BatchNorm2d, module.path[-1]).weight)
    nn.init.kaiming_normal_(model.output.weight, nonlinearity="linear")
    nn.init.zeros_(model.output.bias)


def _stages(depth: int) -> tuple[tuple[int, ...], bool]:
    return STAGES[depth] if depth in STAGES else ((depth // 6,) * 3, False)
