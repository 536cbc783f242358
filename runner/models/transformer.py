"""A transformer's encoder for signals, (B, C, L), or tokens, (B, T), to (B, out_features)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from runner.config.checks import Count, Share, one_of
from runner.errors import RunnerError, at_once
from runner.models.attention import SPREAD, Positions, Stack, linear
from runner.models.shapes import SIGNALS, check_shape, nearest_divisors

POOLINGS = ("mean", "cls")


class Transformer(nn.Module):
    """Attention between all positions, then a linear map of their mean or of a class token (cls).

    Args:
        input_shape: (C, L); or (T,) with vocab_size, for tokens.
        patch_size: Samples of a signal per position, a divisor of L; attention's cost grows with the square of the positions.
        padding_token: Positions with this token are ignored; None for texts of one length.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        out_features: int,
        width: Count = 128,
        depth: Count = 4,
        num_heads: Count = 4,
        *,
        vocab_size: int | None = None,
        patch_size: int = 1,
        pooling: Annotated[str, one_of(POOLINGS)] = "mean",
        positions: Positions = "learned",
        padding_token: int | None = None,
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        self.pooling = pooling
        at_once(
            lambda: check_shape(
                input_shape, model="transformer", takes=[SIGNALS], vocab_size=vocab_size, takes_tokens=True
            ),
            lambda: _check_patches(input_shape, vocab_size, patch_size),
        )
        self.padding_token = padding_token
        num_positions = input_shape[-1] // (patch_size if vocab_size is None else 1)
        self.stack = Stack(
            num_positions + (pooling == "cls"),
            width=width,
            depth=depth,
            num_heads=num_heads,
            dropout=dropout,
            positions=positions,
            is_causal=False,
        )
        self.gathered = nn.Parameter(torch.empty(width)) if pooling == "cls" else None
        if self.gathered is not None:
            nn.init.normal_(self.gathered, std=SPREAD)
        self.embedding = _embedding(input_shape, width, vocab_size, patch_size)
        self.output = linear(width, out_features, spread=1 / math.sqrt(width))

    def forward(self, inputs: Tensor) -> Tensor:
        is_there = None  # (B, T) bool
        if isinstance(self.embedding, nn.Embedding):
            x = self.embedding(inputs)
            if self.padding_token is not None:
                is_there = inputs != self.padding_token
        else:
            x = self.embedding(inputs).transpose(1, 2)
        if self.gathered is not None:
            x = torch.cat([self.gathered.to(x.dtype).expand(len(x), 1, -1), x], 1)
        mask = None if is_there is None else self._mask(is_there)
        x = self.stack(x, mask)
        output: Tensor = self.output(x[:, 0] if self.gathered is not None else _mean(x, is_there))
        return output

    def _mask(self, is_there: Tensor) -> Tensor:
        """Return (B, 1, 1, positions). The first position is never masked: a row of only padding would give NaN."""
        first = torch.ones_like(is_there[:, :1])
        rest = is_there if self.gathered is not None else is_there[:, 1:]
        return torch.cat([first, rest], 1)[:, None, None]


def _embedding(shape: Sequence[int], width: int, vocab_size: int | None, patch_size: int) -> nn.Module:
    if vocab_size is not None:
        embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(embedding.weight, std=SPREAD)
        return embedding
    lift = nn.Conv1d(shape[0], width, patch_size, stride=patch_size)
    nn.init.normal_(lift.weight, std=1 / math.sqrt(shape[0] * patch_size))
    assert lift.bias is not None
    nn.init.zeros_(lift.bias)
    return lift


def _mean(x: Tensor, is_there: Tensor | None) -> Tensor:
    if is_there is None:
        return x.mean(1)
    weights = is_there.to(x.dtype)[..., None]
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def _check_patches(shape: Sequence[int], vocab_size: int | None, patch_size: int) -> None:
    setting, length = f"model.patch_size={patch_size}", shape[-1]
    if type(patch_size) is not int or not 1 <= patch_size <= length:
        problem = f"`model.patch_size` must be 1 to {length}, the number of samples"
        raise RunnerError.suggest(setting, problem, ["model.patch_size=1"])
    if vocab_size is None and length % patch_size:
        problem = f"the last {length % patch_size} of {length} samples would be in no patch"
        ways = [f"model.patch_size={size}" for size in nearest_divisors(patch_size, length)]
        raise RunnerError.suggest(setting, problem, ways)
