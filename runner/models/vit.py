"""A vision transformer for a batch of images: (B, C, H, W) to (B, out_features)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runner.config.checks import Count, Share
from runner.errors import RunnerError
from runner.models.attention import attend, check_heads
from runner.models.shapes import IMAGES, check_shape, nearest_divisors

#: initial standard deviation of position embeddings and weights (Touvron et al. 2021)
SPREAD = 0.02


class ViT(nn.Module):
    """Patches as tokens with learned positions, pre-norm layers of attention and MLP, then the mean of the tokens.

    After Dosovitskiy et al. (2021), with the mean instead of a class token (Beyer et al. 2022).

    Args:
        input_shape: (C, H, W), both sides multiples of patch_size.
        width: Of a token, a multiple of num_heads.
        dropout: After each attention and MLP.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        out_features: int,
        patch_size: Count = 4,
        *,
        width: Count = 192,
        depth: Count = 6,
        num_heads: Count = 3,
        mlp_ratio: Count = 4,
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        _check_shape(input_shape, patch_size)
        check_heads(width, num_heads)
        channels, height, length = input_shape
        num_patches = (height // patch_size) * (length // patch_size)
        self.patches = nn.Conv2d(channels, width, patch_size, patch_size)
        self.positions = nn.Parameter(torch.empty(1, num_patches, width))
        hidden = width * mlp_ratio
        self.layers = nn.Sequential(*(Layer(width, num_heads, hidden, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, out_features)
        _initialise(self)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, H, W) -> (B, out_features)
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.positions  # (B, N, D)
        output: Tensor = self.output(self.norm(self.layers(tokens)).mean(1))
        return output


class Layer(nn.Module):
    """Attention over all tokens, then an MLP, both with a residual connection."""

    def __init__(self, width: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        three = self.queries_keys_values(self.norm(tokens)).unflatten(2, (3, self.num_heads, -1))  # (B, N, 3, H, D/H)
        seen = attend(*three.permute(2, 0, 3, 1, 4).unbind(0))  # (B, H, N, D/H)
        tokens = tokens + self.dropout(self.mix(seen.transpose(1, 2).flatten(2)))
        added: Tensor = tokens + self.dropout(self.mlp(self.mlp_norm(tokens)))
        return added


def _initialise(model: ViT) -> None:
    nn.init.trunc_normal_(model.positions, std=SPREAD)
    for module in model.layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=SPREAD)
            nn.init.zeros_(module.bias)
    for outside in (model.patches, model.output):
        nn.init.kaiming_normal_(outside.weight, nonlinearity="linear")
        assert outside.bias is not None
        nn.init.zeros_(outside.bias)


def _check_shape(shape: Sequence[int], patch_size: int) -> None:
    check_shape(shape, model="vit", takes=[IMAGES])
    if shape[1] % patch_size or shape[2] % patch_size:
        problem = f"patches of {patch_size} pixels don't fill the image"
        source = f"model.patch_size={patch_size}, model=vit on inputs of shape {tuple(shape)}"
        ways = [f"model.patch_size={size}" for size in nearest_divisors(patch_size, *shape[1:])]
        raise RunnerError.suggest(source, problem, ways)
