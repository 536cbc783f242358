"""Makes a Source of text files whose rows are windows of tokens: `data=text`. The text must fit into memory."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.array_files import no_such_file
from runner.data.language.vocabulary import Vocabulary, asked_for, vocabulary
from runner.data.language.windows import TokenWindows, check_windows, facts_of_tokens, num_windows, rows_of
from runner.data.source import Source
from runner.errors import RunnerError

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
