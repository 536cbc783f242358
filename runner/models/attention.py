"""Transformer blocks: attention and a feed-forward part, pre-norm, over a sequence of vectors, (B, T, D)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import one_of
from runner.errors import RunnerError
from runner.models.shapes import nearest_divisors

Positions = Annotated[str, one_of(("learned", "rotary"))]
#: of all weights but those that write into the residual stream (Radford et al. 2019, "Language Models are Unsupervised ...")
SPREAD = 0.02
ROTARY_BASE = 10_000.0


class Stack(nn.Module):
    """`depth` blocks between position embeddings and a LayerNorm, for encoders and decoders.

    Weights: normal with standard deviation 0.02, divided by sqrt(2 depth) if they write to the residual stream (Radford et
    al. 2019); zero biases. Learned positions are added; rotary ones (Su et al. 2021) rotate queries and keys.
    """

    def __init__(
        self, length: int, *, width: int, depth: int, num_heads: int, dropout: float, positions: str, is_causal: bool
    ) -> None:
        super().__init__()
        check_heads(width, num_heads)
        self.positions = nn.Parameter(torch.empty(length, width)) if positions == "learned" else None
        if self.positions is not None:
            nn.init.normal_(self.positions, std=SPREAD)
        rotary = Rotary(length, width // num_heads) if positions == "rotary" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout=dropout, rotary=rotary, is_causal=is_causal, depth=depth)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (B, T, D). mask: (B, 1, 1, T) bool, true where a position may be looked at; None for all."""
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask)
        output: Tensor = self.norm(x)
        return output


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self, width: int, num_heads: int, *, dropout: float, rotary: Rotary | None, is_causal: bool, depth: int
    ) -> None:
        super().__init__()
        self.num_heads, self.is_causal, self._dropout = num_heads, is_causal, dropout
        self.rotary = rotary
        residual = SPREAD / (2 * depth) ** 0.5
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = linear(width, 3 * width, spread=SPREAD)
        self.attended = linear(width, width, spread=residual)
        self.hidden = linear(width, 4 * width, spread=SPREAD)
        self.output = linear(4 * width, width, spread=residual)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attended(self._attention(self.norms[0](x), mask)))
        output: Tensor = x + self.dropout(self.output(F.gelu(self.hidden(self.norms[1](x)))))
        return output

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.queries_keys_values(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # (B, H, T, D / H) each
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        dropout = self._dropout if self.training else 0.0
        seen = attend(query, key, value, mask=mask, dropout=dropout, is_causal=self.is_causal)
        return seen.transpose(1, 2).flatten(2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Return torch's attention of (B, H, T, D), avoiding silent errors on MPS.

    There, is_causal in half precision lets three of four rows see later positions (pytorch#195910), and views of a permute
    (#163597, #181133) and partly broadcast masks (#184180) give wrong values.
    """
    if _has_problems(query):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        batch, heads, length, _ = query.shape
        if is_causal:
            mask, is_causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril(), False
        if mask is not None:
            mask = mask.expand(batch, heads, length, length).contiguous()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)


def attend_by_steps(
    query: Tensor,  # (..., L, E)
    key: Tensor,  # (..., S, E)
    value: Tensor,  # (..., S, V)
    *,
    mask: Tensor | None,
    is_causal: bool,
    drop: Callable[[Tensor], Tensor],
    scale: float | None = None,
) -> Tensor:
    """Return attention computed by products and a softmax. drop: applied to the weights, (..., L, S)."""
    root = (query.size(-1) ** -0.5 if scale is None else scale) ** 0.5  # on both sides, as torch has it
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1) if mask is None or is_causal else _safe_softmax(scores)
    return drop(weights) @ value


def _safe_softmax(scores: Tensor) -> Tensor:
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)


def _has_problems(tensor: Tensor) -> bool:
    return tensor.device.type == "mps"


class Rotary(nn.Module):
    """Rotary positions: rotate pairs of a head's values by an angle proportional to the position (Su et al. 2021)."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        if size % 2:
            problem = f"rotary positions need an even width per head, and a head has {size}"
            raise RunnerError.of(
                "model.positions=rotary", problem, "use a `model.width` that gives each head an even number"
            )
        speeds = ROTARY_BASE ** -(torch.arange(0, size, 2) / size)
        angles = torch.arange(length)[:, None] * speeds
        self.register_buffer("cosine", angles.cos(), persistent=False)  # (length, size / 2)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, H, T, size)
        cosine, sine = self.cosine[: x.shape[2]].to(x.dtype), self.sine[: x.shape[2]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def linear(inputs: int, outputs: int, *, spread: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=spread)
    nn.init.zeros_(layer.bias)
    return layer


def check_heads(width: int, num_heads: int) -> None:
    """Raises: RunnerError for a width that the heads don't divide."""
    if width % num_heads:
        problem = f"`model.width={width}` can't be divided into {num_heads} equal heads"
        ways = [f"model.num_heads={heads}" for heads in nearest_divisors(num_heads, width)]
        raise RunnerError.suggest(f"model.num_heads={num_heads}", problem, ways)
