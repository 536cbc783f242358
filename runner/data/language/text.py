"""Turns texts into token numbers and back, and makes a Source of text files: windows and the tokens that follow (`data=text`).

Row i is the T tokens from i * T. In training with `windows=random` it is moved back by a random number below T: every window
of the training split is equally likely, and no window reaches into the split behind it.
"""

from __future__ import annotations

import copy
import glob
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runner.config.checks import Count, no_such_file, one_of
from runner.config.packages import not_installed
from runner.data.source import Source
from runner.errors import RunnerError, first_line, nearest

Tokens = NDArray[Any]  # (N,) whole numbers
CHARACTERS, BYTES = KINDS = ("characters", "bytes")
#: the kind of a tokenizer.json's vocabulary, in model.json
TOKENIZER = "tokenizer"
NUM_CODE_POINTS, NUM_BYTES = 0x110000, 256
#: names of the padding token in tokenizers
PADDING = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|padding|>", "<|finetune_right_pad_id|>")
#: targets that don't count, as in torch's cross-entropy
IGNORED = -100


class TextRows:
    """Encode texts as rows of `length` tokens: longer ones are cut, shorter ones filled with `padding`.

    entries: the content of a tokenizer.json; None for bytes, with 256 as the padding.
    """

    def __init__(self, entries: str | None, length: int, *, setting: str = "data.tokenizer") -> None:
        """Raises: RunnerError for a content that tokenizers can't read."""
        self.entries = None if entries is None else without_references(entries)
        self.length = length
        self._num_texts = self._num_cut = self._longest = 0
        self._tokenizer = None if entries is None else tokenizer_of(entries, setting=setting)
        known: dict[str, int] = {} if self._tokenizer is None else self._tokenizer.get_vocab(with_added_tokens=True)
        count = NUM_BYTES if self._tokenizer is None else max(known.values(), default=0) + 1
        self.padding = next((known[name] for name in PADDING if name in known), count)
        self.vocab_size = max(count, self.padding + 1)

    def encode(self, texts: Sequence[str]) -> Tensor:  # -> (N, length) int64
        rows = torch.full((len(texts), self.length), self.padding)
        for row, text in zip(rows, texts, strict=True):
            # one by one: the threads of its batches don't survive the fork of a worker process
            numbers = list(text.encode() if self._tokenizer is None else self._tokenizer.encode(text).ids)
            self._longest = max(self._longest, len(numbers))
            self._num_cut += len(numbers) > self.length
            numbers = numbers[: self.length]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        self._num_texts += len(texts)
        return rows

    def what_was_cut(self) -> str:
        """Describe how many of the texts so far were cut; "" if all are whole."""
        if not self._num_cut:
            return ""
        texts = f"{self._num_cut:,} of {self._num_texts:,} texts that were read"
        return f"{texts} have more than {self.length:,} tokens (up to {self._longest:,}), and are cut there"

    def next_tokens(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # (N, length) -> twice (N, length - 1)
        """Return inputs, and the token that follows each; padding doesn't count."""
        targets = rows[:, 1:]
        return rows[:, :-1].contiguous(), torch.where(targets == self.padding, IGNORED, targets)


class Characters:
    """Every character of a text is a token, numbered in the order of code points."""

    kind = CHARACTERS

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries, self.size = list(entries), len(entries)
        self._codes = np.array([ord(entry) for entry in entries], np.uint32)
        self._numbers = np.full(NUM_CODE_POINTS, -1, np.int32)
        self._numbers[self._codes] = np.arange(self.size)

    def encode(self, content: bytes, *, setting: str) -> Tokens:
        """Raises: RunnerError for a text that is not UTF-8, or has an unknown character, with its position."""
        text = as_text(content, setting=setting)
        found = self._numbers[_code_points(text)]
        if len(found) and found.min() < 0:
            at = int((found < 0).argmax())
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            problem = f"{text[at]!r} in line {line:,}, column {column:,} is not one of the {self.size} characters of the training text"
            fix = "remove it, or train on text that contains it or with `data.tokens=bytes`"
            raise RunnerError.of(setting, problem, fix)
        # the smallest type that every device has
        return found.astype(smallest(self.size))

    def decode(self, tokens: Sequence[int]) -> str:
        numbers = np.asarray(tokens, np.int64)
        if (largest := numbers.max(initial=0)) >= self.size:
            problem = f"the data has {self.size} tokens, and the model's vocabulary is larger"
            raise RunnerError.of(f"token {largest}", problem, f"set the model's `vocab_size` to {self.size}")
        return self._codes[numbers].astype("<u4").tobytes().decode("utf-32-le")


class Bytes:
    """Every byte is a token, so that no text is unknown."""

    kind, size, entries = BYTES, NUM_BYTES, None

    def encode(self, content: bytes, *, setting: str) -> Tokens:
        return np.frombuffer(content, np.uint8).copy()

    def decode(self, tokens: Sequence[int]) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


class Subwords:
    """The tokens of a tokenizer.json of the `tokenizers` library, without its special tokens. entries: its content."""

    kind = TOKENIZER

    def __init__(self, entries: str, *, setting: str = "data.tokens") -> None:
        self._tokenizer = tokenizer_of(entries, setting=setting)
        self.entries = without_references(entries)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1

    def encode(self, content: bytes, *, setting: str) -> Tokens:
        text = as_text(content, setting=setting)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, smallest(self.size))

    def decode(self, tokens: Sequence[int]) -> str:
        numbers = [int(token) for token in tokens]
        return str(self._tokenizer.decode(numbers, skip_special_tokens=False))


#: token numbers are below `size`; `vocabulary(kind, entries)` makes the same again from these plain values
Vocabulary = Characters | Bytes | Subwords


def vocabulary(kind: str, entries: Any = None) -> Vocabulary:
    """Return the vocabulary of an earlier run."""
    if kind == TOKENIZER:
        return Subwords(entries)
    return Bytes() if kind == BYTES else Characters(entries)


def new_vocabulary(tokens: str, contents: Iterable[bytes], *, setting: str, key: str = "data.tokens") -> Vocabulary:
    """Return the vocabulary that `data.tokens` names; characters are those of the contents. Raises: RunnerError."""
    if tokens == BYTES:
        return Bytes()
    if tokens == CHARACTERS:
        is_there = np.zeros(NUM_CODE_POINTS, bool)
        for content in contents:
            is_there[_code_points(as_text(content, setting=setting))] = True
        return Characters([chr(code) for code in np.flatnonzero(is_there)])
    return Subwords(_content_of(tokens, KINDS, key=key), setting=f"{key}={tokens}")


def entries_of(tokenizer: str) -> str | None:
    """Return the content of the file that data.tokenizer names; None for bytes. Raises: RunnerError."""
    return None if tokenizer == BYTES else _content_of(tokenizer, (BYTES,), key="data.tokenizer")


def without_references(entries: str) -> str:
    """Return the same JSON without dollar signs: ${ would be a reference in a node."""
    return entries.replace("$", "\\u0024")


def _content_of(name: str, kinds: Sequence[str], *, key: str) -> str:
    file = Path(name).expanduser()
    if not file.is_file():
        there = [str(item) for item in file.parent.glob("*.json")] if file.parent.is_dir() else []
        ways = [f"{key}={hit}" for hit in nearest(name, (*kinds, *there)) or [*kinds, *there]]
        problem = f"`{key}` must be {' or '.join(kinds)} or a `tokenizer.json`, and there is no file `{file}`"
        raise RunnerError.suggest(f"{key}={name}", problem, ways, code="missing-file")
    return file.read_text(encoding="utf-8", errors="replace")


def as_text(content: bytes, *, setting: str) -> str:
    """Decode UTF-8. Raises: RunnerError with the position of the first other byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"the file is not UTF-8: byte {error.start:,} (line {line:,}) is 0x{content[error.start]:02x}"
        raise RunnerError.of(setting, problem, "save the file as UTF-8, or use `data.tokens=bytes`") from None


def smallest(size: int) -> type[np.uint8] | type[np.int16] | type[np.int32]:
    return np.uint8 if size <= 2**8 else np.int16 if size <= 2**15 else np.int32


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def tokenizer_of(content: str, *, setting: str) -> Any:
    """Return the tokenizer of a tokenizer.json's content; it neither cuts nor pads. Raises: RunnerError."""
    try:
        from tokenizers import Tokenizer  # an optional package
    except ImportError:
        problem = "reading a `tokenizer.json` needs a package that is not installed"
        raise not_installed(setting, problem, "text") from None
    try:
        json.loads(content)
        found = Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exceptions
        problem = f"the file is not a `tokenizer.json`: {first_line(error)}"
        raise RunnerError.of(setting, problem, "use a file saved by tokenizers or transformers") from None
    found.no_truncation()
    found.no_padding()
    return found


Windows = Annotated[str, one_of(("random", "sequential"))]


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


def check_windows(context_length: int, *, num_tokens: int, path: str) -> None:
    """Raise a RunnerError for a text that is too short for a window."""
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
    context_length: Count = 256,
    windows: Windows = "random",
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
        found = new_vocabulary(tokens, contents, setting=f"data.path={shown}")
    else:
        found, context_length = vocabulary(like["tokens"], like["entries"]), like["context_length"]
    parts = [found.encode(content, setting=f"data.path={file}") for file, content in zip(files, contents, strict=True)]
    numbers = np.concatenate(parts)
    check_windows(context_length, num_tokens=len(numbers), path=shown)
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
            setting = f"{key}={name}"
            if file.is_dir():
                raise RunnerError.suggest(setting, f"`{file}` is a directory", [f"{key}={file / '*.txt'}"])
            raise RunnerError(no_such_file(setting, file, key, Path.is_file, f"use `{key}=FILE` with a text file"))
        files += [hit for hit in hits if hit not in files]
    if not files or (most is not None and len(files) > most):
        problem = f"the pattern matches {len(files)} files"
        raise RunnerError.of(f"{key}={path}", problem, f"use `{key}=FILE`")
    return files
