"""Makes windows of tokens, and the token that follows each, on the device, from the rows that the host gives.

Row i stands for the tokens from i * T on. In training with `windows=random` it is moved back by a draw, by less than T:
every window of the training split is as likely as another, and none reaches into the split behind it.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runner.errors import Problem, nearest, refuse

WINDOWS = ("random", "sequential")


class TokenWindows(nn.Module):
    """Rows are window starts, (B,) int64; the text itself lies here: finish of `data=text`."""

    tokens: Tensor
    steps: Tensor

    def __init__(self, tokens: Tensor, context_length: int, *, is_random: bool) -> None:  # tokens: (N,)
        super().__init__()
        self.context_length, self.num_draws = context_length, int(is_random)
        self.register_buffer("tokens", tokens)
        self.register_buffer("steps", torch.arange(context_length + 1))

    def forward(self, starts: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) inputs and (B, T) targets, int64."""
        if draws.shape[1]:
            starts = (starts - moved(draws, self.context_length)).clamp(min=0)
        return shifted(self.tokens[starts[:, None] + self.steps])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Each split has one, in a mode of its own; the text is there once, also on the device."""
        return copy.copy(self)  # its buffers' dict is the same object


class ChunkWindows(nn.Module):
    """Rows are chunks, (B, T + 1), or (B, 2 T + 1) where a draw says which window of them: finish of `data=tokens`."""

    steps: Tensor

    def __init__(self, context_length: int, *, is_random: bool) -> None:
        super().__init__()
        self.context_length, self.num_draws = context_length, int(is_random)
        self.register_buffer("steps", torch.arange(context_length + 1))

    def forward(self, batch: tuple[Tensor, Tensor], draws: Tensor) -> tuple[Tensor, Tensor]:
        """batch: the chunks, and by how many tokens each window may be moved back at most, (B,) int64."""
        chunks, most = batch
        first = chunks.shape[1] - self.context_length - 1
        starts = torch.full_like(most, first)
        if draws.shape[1]:
            starts = starts - torch.minimum(moved(draws, self.context_length), most)
        return shifted(chunks.gather(1, starts[:, None] + self.steps))


def moved(draws: Tensor, context_length: int) -> Tensor:
    """(B, 1) in [0, 1) -> (B,) int64 in 0 .. T - 1."""
    return (draws[:, 0] * context_length).to(torch.int64).clamp(max=context_length - 1)  # float32 may round up to T


def shifted(windows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T + 1) -> what is read and what follows it, (B, T) int64 each."""
    windows = windows.to(torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def num_windows(num_tokens: int, context_length: int) -> int:
    """Windows that stand one behind the other, each with the token behind it."""
    return (num_tokens - 1) // context_length


def check_windows(context_length: Any, windows: Any, *, num_tokens: int, path: str) -> None:
    """Raises: RunnerError for settings that are none, and for a text that is too short for them."""
    problems = []
    if windows not in WINDOWS:
        hits = nearest(str(windows), WINDOWS) or WINDOWS
        problem = f"`data.windows` must be {' or '.join(WINDOWS)}"
        problems.append(Problem.suggest(f"data.windows={windows}", problem, (f"data.windows={hit}" for hit in hits)))
    asked = f"data.context_length={context_length}"
    if type(context_length) is not int or context_length < 1:
        problems.append(
            Problem.suggest(
                asked,
                "`data.context_length` must be a number of tokens, 1 or more",
                ["data.context_length=256"],
            )
        )
    elif num_windows(num_tokens, context_length) < 1:
        problem = f"`{path}` has {num_tokens:,} tokens, and a window needs {context_length + 1:,} (with the next token)"
        fits = f"use `data.context_length={max(1, num_tokens // 20)}`, or a" if num_tokens > 1 else "use a"
        problems.append(Problem(asked, problem, f"{fits} longer text"))
    refuse(problems)


def rows_of(tokens: NDArray[Any], context_length: int) -> Tensor:
    """(N, T) int64 windows for prediction, one behind the other; the last one ends where the text ends.

    A text shorter than a window is one row of its own length.
    """
    if len(tokens) <= context_length:
        return torch.from_numpy(tokens.astype(np.int64))[None]
    starts = np.append(np.arange(0, len(tokens) - context_length, context_length), len(tokens) - context_length)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(context_length)].astype(np.int64))


def facts_of_tokens(vocab_size: int, context_length: int, *, bytes_per_token: float | None) -> dict[str, Any]:
    return {
        "input_shape": [context_length],
        "num_classes": None,
        "out_features": vocab_size,
        "vocab_size": vocab_size,
        "context_length": context_length,
        "bytes_per_token": bytes_per_token,
    }
