"""A transformer's encoder for signals, (B, C, L), or tokens, (B, T), to (B, out_features)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runner.errors import Problem, nearest, refuse
from runner.models.attention import SPREAD, Stack, linear

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
        width: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        *,
        vocab_size: int | None = None,
        patch_size: int = 1,
        pooling: str = "mean",
        positions: str = "learned",
        padding_token: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(input_shape, vocab_size, patch_size, pooling)
        self.padding_token, self.pooling = padding_token, pooling
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


def _check(shape: Sequence[int], vocab_size: int | None, patch_size: int, pooling: str) -> None:
    asked, problems = f"model=transformer on inputs of shape {tuple(shape)}", []
    if vocab_size is not None and len(shape) != 1:
        problems.append(
            Problem.suggest(asked, "with `model.vocab_size` the model needs tokens, (T,)", ["model.vocab_size=null"])
        )
    if vocab_size is None and len(shape) == 1:
        problem = "`transformer` needs signals of shape (channels, length), or tokens and `model.vocab_size`"
        problems.append(Problem(asked, problem, "use `model.vocab_size=N` for tokens, or `model=mlp` for tables"))
    if vocab_size is None and len(shape) > 2:
        problem = "the model needs signals of shape (channels, length)"
        problems.append(Problem(asked, problem, "use `model=cnn` for images, or signals as inputs"))
    if type(patch_size) is not int or not 1 <= patch_size <= shape[-1]:
        problem = f"`model.patch_size` must be 1 to {shape[-1]}, the number of samples"
        problems.append(Problem.suggest(f"model.patch_size={patch_size}", problem, ["model.patch_size=1"]))
    elif vocab_size is None and shape[-1] % patch_size:
        problem = f"the last {shape[-1] % patch_size} of {shape[-1]} samples would be in no patch"
        fits = [size for size in range(1, shape[-1] + 1) if shape[-1] % size == 0]
        near = sorted(sorted(fits, key=lambda size: abs(size - patch_size))[:2])
        ways = [f"model.patch_size={size}" for size in near]
        problems.append(Problem.suggest(f"model.patch_size={patch_size}", problem, ways))
    if pooling not in POOLINGS:
        problem = f"`model.pooling` must be {' or '.join(POOLINGS)}"
        ways = [f"model.pooling={hit}" for hit in nearest(str(pooling), POOLINGS) or POOLINGS]
        problems.append(Problem.suggest(f"model.pooling={pooling}", problem, ways))
    refuse(problems)
