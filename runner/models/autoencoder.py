"""An autoencoder: compresses a batch of anything, (B, ...), to a narrow code and reconstructs it, (B, ...)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Count, Widths, one_of
from runner.errors import RunnerError
from runner.models.cnn import LAYERS
from runner.models.mlp import ACTIVATIONS, Activation


class Autoencoder(nn.Module):
    """decode(encode(x)), with `bottleneck` numbers in between; without an activation at the end.

    kind: `conv`, strided convolutions down and the same sizes up again, for images (C, H, W) and signals (C, L); `mlp`,
    linear layers, for any shape; `auto`: conv where the shape allows. channels: of conv, halving the sides each (rounded
    up, so that any size comes back); hidden_sizes: of mlp, mirrored in the decoder. Kaiming-normal weights, zero biases.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        bottleneck: Count = 32,
        *,
        kind: Annotated[str, one_of(("auto", "conv", "mlp"))] = "auto",
        channels: Widths = (32, 64),
        hidden_sizes: Widths = (256,),
        activation: Activation = "relu",
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if vocab_size is not None:
            problem = "an autoencoder needs numbers as inputs, and this data is tokens"
            raise RunnerError.of("model=autoencoder", problem, "use `model=gpt task=language`, or data that is numbers")
        can_convolve = len(input_shape) - 1 in LAYERS
        if kind == "conv" and not can_convolve:
            problem = (
                "convolutions need images of shape (channels, height, width) or signals of shape (channels, length)"
            )
            source = f"model.kind=conv on inputs of shape {tuple(input_shape)}"
            raise RunnerError.suggest(source, problem, ["model.kind=mlp"])
        if kind == "conv" or (kind == "auto" and can_convolve):
            layers = _convolutional(input_shape, channels, bottleneck, activation)
        else:
            layers = _linear(input_shape, hidden_sizes, bottleneck, activation)
        self.encoder, self.decoder = (nn.Sequential(*part) for part in layers)
        _initialise(self)

    def encode(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, bottleneck)
        code: Tensor = self.encoder(inputs)
        return code

    def decode(self, code: Tensor) -> Tensor:  # (B, bottleneck) -> (B, ...)
        outputs: Tensor = self.decoder(code)
        return outputs

    def forward(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, ...)
        return self.decode(self.encode(inputs))


class Resize(nn.Module):
    """Resize to a size, by nearest neighbor."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self.size = tuple(size)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, ...) -> (B, C, *size)
        return F.interpolate(inputs, size=self.size)


def _linear(
    shape: Sequence[int], hidden_sizes: Sequence[int], bottleneck: int, activation: str
) -> tuple[list[nn.Module], list[nn.Module]]:
    sizes = [math.prod(shape), *hidden_sizes, bottleneck]
    encoder = [nn.Flatten(), *_layers(sizes, activation)]
    return encoder, [*_layers(sizes[::-1], activation), nn.Unflatten(1, tuple(shape))]


def _layers(sizes: Sequence[int], activation: str) -> list[nn.Module]:
    make = ACTIVATIONS[activation]
    layers = [layer for inputs, outputs in itertools.pairwise(sizes) for layer in (nn.Linear(inputs, outputs), make())]
    return layers[:-1]


def _convolutional(
    shape: Sequence[int], channels: Sequence[int], bottleneck: int, activation: str
) -> tuple[list[nn.Module], list[nn.Module]]:
    make = ACTIVATIONS[activation]
    convolution: Any = LAYERS[len(shape) - 1][0]
    encoder: list[nn.Module] = []
    sizes, size = [], list(shape)
    for width in channels:
        encoder += [convolution(size[0], width, 3, stride=2, padding=1), make()]
        sizes.append(size)
        size = [width, *(-(-side // 2) for side in size[1:])]
    flat = math.prod(size)
    encoder += [nn.Flatten(), nn.Linear(flat, bottleneck)]
    decoder: list[nn.Module] = [nn.Linear(bottleneck, flat), nn.Unflatten(1, tuple(size))]
    for before in reversed(
        sizes
    ):  # a resize and a convolution, as transposed convolutions leave a checkerboard pattern
        decoder += [make(), Resize(before[1:]), convolution(size[0], before[0], 3, padding=1)]
        size = before
    return encoder, decoder


def _initialise(model: Autoencoder) -> None:
    for part in (model.encoder, model.decoder):
        layers = [module for module in part if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)]
        for layer in layers:
            is_last = layer is layers[-1]
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if is_last else "relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
