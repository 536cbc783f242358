"""Makes a Source of text files: windows of tokens, and the token that follows each (`data=text`).

Row i is the T tokens from i * T. In training with `windows=random` it is moved back by a random number below T: every window
of the training split is equally likely, and no window reaches into the split behind it.
"""

from __future__ import annotations

import copy
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from runner.config.checks import choice, count
from runner.data.array_files import no_such_file
from runner.data.language.vocabulary import new_vocabulary, vocabulary
from runner.data.source import Source
from runner.errors import RunnerError, at_once

WINDOWS = ("random", "sequential")


class TokenWindows(nn.Module):
    """The batch transform of `data=text`. Rows are window starts, (B,) int64, and a buffer holds the text."""

    tokens: Tensor
    steps: Tensor

    def __init__(self, tokens: Tensor, context_length: int, *, is_random: bool) -> None:  # tokens: (N,)
        super().__init__()
        self.context_length, self.num_draws = context_length, int(is_random)
        self.register_buffer("tokens", tokens)
        self.register_buffer("steps", torch.arange(context_length + 1))

    def forward(self, starts: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T) inputs and (B, T) targets, int64."""
        if draws.shape[1]:
            starts = (starts - moved(draws, self.context_length)).clamp(min=0)
        return shifted(self.tokens[starts[:, None] + self.steps])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)  # the splits' copies share the buffers, also on the device


def moved(draws: Tensor, context_length: int) -> Tensor:
    """Return (B,) int64 in 0 .. T - 1 for draws (B, 1) in [0, 1)."""
    return (draws[:, 0] * context_length).to(torch.int64).clamp(max=context_length - 1)  # float32 may round up to T


def shifted(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and the tokens that follow, (B, T) int64 each, of windows (B, T + 1)."""
    windows = windows.to(torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def num_windows(num_tokens: int, context_length: int) -> int:
    return (num_tokens - 1) // context_length


def check_windows(context_length: Any, windows: Any, *, num_tokens: int, path: str) -> None:
    """Raise a RunnerError for settings that are not valid, or a text that is too short for them."""
    at_once(
        lambda: choice(windows, WINDOWS, key="data.windows"),
        lambda: count(context_length, key="data.context_length", example=256),
    )
    if num_windows(num_tokens, context_length) < 1:
        problem = f"`{path}` has {num_tokens:,} tokens, and a window needs {context_length + 1:,} (with the next token)"
        fits = f"use `data.context_length={max(1, num_tokens // 20)}`, or a" if num_tokens > 1 else "use a"
        raise RunnerError.of(f"data.context_length={context_length}", problem, f"{fits} longer text")


def facts_of_tokens(vocab_size: int, context_length: int, *, bytes_per_token: float | None) -> dict[str, Any]:
    return {
        "input_shape": [context_length],
        "num_classes": None,
        "out_features": vocab_size,
        "vocab_size": vocab_size,
        "context_length": context_length,
        "bytes_per_token": bytes_per_token,
    }


READER = "runner.data.TextReader"


def text(
    path: str | Sequence[str],
    *,
    tokens: str = "characters",
    context_length: int = 256,
    windows: str = "random",
    like: dict[str, Any] | None = None,
) -> Source:
    """Return windows of `context_length` tokens and the tokens that follow. The text's last parts are the other splits.

    Args:
        path: A file, a list of files or a glob (*.txt), which are joined in the order of their names. The other arguments
            are explained in conf/data/text.yaml.
        like: The reader of an earlier run, whose vocabulary and context length hold.
    """
    files = find_files(path, key="data.path")
    contents = [file.read_bytes() for file in files]
    shown = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    if like is None:
        found = new_vocabulary(tokens, contents, asked=f"data.path={shown}")
    else:
        found, context_length = vocabulary(like["tokens"], like["entries"]), like["context_length"]
    parts = [found.encode(content, asked=f"data.path={file}") for file, content in zip(files, contents, strict=True)]
    numbers = np.concatenate(parts)
    check_windows(context_length, windows, num_tokens=len(numbers), path=shown)
    unit = found.kind if found.kind != "tokenizer" else f"tokens of {found.size:,} kinds"
    return Source(
        "text",
        torch.arange(num_windows(len(numbers), context_length)) * context_length,
        facts_of_tokens(found.size, context_length, bytes_per_token=sum(map(len, contents)) / len(numbers)),
        origin=f"{shown}: {len(numbers):,} {unit}",
        finish=TokenWindows(torch.from_numpy(numbers), context_length, is_random=windows == "random"),
        reader={"_target_": READER, "tokens": found.kind, "entries": found.entries, "context_length": context_length},
        in_order=True,
    )


def find_files(path: str | Sequence[str], *, key: str, most: int | None = None) -> list[Path]:
    """Return the files of a name, a list of names or a glob, each once. Raises: RunnerError with the nearest names."""
    files: list[Path] = []
    for name in [path] if isinstance(path, str) else path:
        file = Path(name).expanduser()
        hits = [file] if file.is_file() else [Path(hit) for hit in sorted(glob.glob(str(file), recursive=True))]  # noqa: PTH207 - Path.glob raises ValueError for some names
        hits = [hit for hit in hits if hit.is_file()]
        if not hits:
            asked = f"{key}={name}"
            if file.is_dir():
                raise RunnerError.suggest(asked, f"`{file}` is a directory", [f"{key}={file / '*.txt'}"])
            raise RunnerError(no_such_file(asked, file, key, Path.is_file, f"use `{key}=FILE` with a text file"))
        files += [hit for hit in hits if hit not in files]
    if not files or (most is not None and len(files) > most):
        problem = f"the pattern matches {len(files)} files"
        raise RunnerError.of(f"{key}={path}", problem, f"use `{key}=FILE`")
    return files
