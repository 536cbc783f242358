"""The network of each size, by its name, from torch's layers: the same one for every peer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

VOCAB_SIZE, NUM_TOKENS, WIDTH = 256, 32, 128


class Net(nn.Sequential):
    """(B, 10) logits from inputs of the size's shape."""

    def __init__(self, size: str) -> None:
        super().__init__(*LAYERS[size]())


class Positions(nn.Module):
    """Adds a learned vector to each position of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(NUM_TOKENS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, 32, 128) -> (B, 32, 128)
        return tokens + self.places


class Mean(nn.Module):
    """The mean over the positions of a row."""

    def forward(self, tokens: Tensor) -> Tensor:  # (B, 32, 128) -> (B, 128)
        return tokens.mean(1)


def _mlp() -> list[nn.Module]:
    return [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)]


def _cnn() -> list[nn.Module]:
    widths = (3, 16, 32, 64)
    layers: list[nn.Module] = []
    for before, width in pairwise(widths):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]


def _transformer() -> list[nn.Module]:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return [nn.Embedding(VOCAB_SIZE, WIDTH), Positions(), encoder, Mean(), nn.Linear(WIDTH, 10)]


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}
