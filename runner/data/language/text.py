"""Makes a Source of text files: windows of tokens, and the token that follows each (`data=text`).

Row i stands for the tokens from i * T. In training with `windows=random` it is moved back by a random number below T:
every window of the training split is equally likely, and none reaches into the split behind it.
"""

from __future__ import annotations

import copy
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runner.data.array_files import no_such_file
from runner.data.language.vocabulary import Vocabulary, asked_for, vocabulary
from runner.data.source import Source
from runner.errors import Problem, RunnerError, nearest, refuse

WINDOWS = ("random", "sequential")


class TokenWindows(nn.Module):
    """Rows are window starts, (B,) int64; a buffer holds the text. The batch transform of `data=text`."""

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
        """Each split has a copy in another mode; they share the text, also on the device."""
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
    """Return the number of windows, one after the other, each followed by a token."""
    return (num_tokens - 1) // context_length


def check_windows(context_length: Any, windows: Any, *, num_tokens: int, path: str) -> None:
    """Raise a RunnerError for settings that are not valid, or a text that is too short for them."""
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
    """Return (N, T) int64 windows for predictions, one after the other; the last one ends with the text.

    A text shorter than a window is one row of the text's length.
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


READER = "runner.data.TextReader"


def text(
    path: str | Sequence[str],
    *,
    tokens: str = "characters",
    context_length: int = 256,
    windows: str = "random",
    like: dict[str, Any] | None = None,
) -> Source:
    """Windows of `context_length` tokens and the tokens that follow; the text's last parts are validated and tested on.

    path: a file, a list of files or a glob (*.txt); several are read end to end, by name. tokens: characters (those
    of the whole text), bytes, or a tokenizer.json. windows: random (in training each is moved by chance, once an epoch),
    or sequential. like: an earlier run's reader; its vocabulary and context length hold.
    Memory: the text, 4 bytes a character for a while, and a token's 1, 2 or 4 bytes, on the device.
    Raises: RunnerError for files that are missing or not UTF-8, and for a text that is shorter than a window.
    """
    files = found_files(path, key="data.path")
    contents = [file.read_bytes() for file in files]
    shown = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    if like is None:
        found = asked_for(tokens, contents, asked=f"data.path={shown}")
    else:
        found, context_length = vocabulary(like["tokens"], like["entries"]), like["context_length"]
    parts = [found.encode(content, asked=f"data.path={file}") for file, content in zip(files, contents, strict=True)]
    numbers = np.concatenate(parts)
    check_windows(context_length, windows, num_tokens=len(numbers), path=shown)
    what = found.kind if found.kind != "tokenizer" else f"tokens of {found.size:,} kinds"
    return Source(
        "text",
        torch.arange(num_windows(len(numbers), context_length)) * context_length,
        facts_of_tokens(found.size, context_length, bytes_per_token=sum(map(len, contents)) / len(numbers)),
        origin=f"{shown}: {len(numbers):,} {what}",
        finish=TokenWindows(torch.from_numpy(numbers), context_length, is_random=windows == "random"),
        reader=reader_node(found, context_length),
        in_order=True,
    )


class TextReader:
    """Reads a person's text files as windows for prediction, and turns tokens back into text."""

    def __init__(self, tokens: str, entries: Any, context_length: int) -> None:
        self._vocabulary = vocabulary(tokens, entries)
        self.vocab_size, self.context_length = self._vocabulary.size, context_length

    def __call__(self, path: str) -> Tensor:
        """(N, T) int64, one window behind the other. Raises: RunnerError, as for a character that is not known."""
        (file,) = found_files(path, key="--input", most=1)
        numbers = self._vocabulary.encode(file.read_bytes(), asked=f"--input {path}")
        if not len(numbers):
            raise RunnerError.of(f"--input {path}", f"`{path}` is empty", "use a file with text")
        return rows_of(numbers, self.context_length)

    def encode(self, text: str) -> list[int]:
        """Raises: RunnerError for characters that are not known."""
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        return [int(number) for number in self._vocabulary.encode(text.encode(), asked=f"the text {shown!r}")]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._vocabulary.decode(tokens)


def reader_node(found: Vocabulary, context_length: int) -> dict[str, Any]:
    return {"_target_": READER, "tokens": found.kind, "entries": found.entries, "context_length": context_length}


def found_files(path: str | Sequence[str], *, key: str, most: int | None = None) -> list[Path]:
    """The files that a name, a list of them or a glob leads to, each once. Raises: RunnerError with the nearest names."""
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
