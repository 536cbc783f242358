"""Turns texts into token numbers, and back: whole texts, and rows that are cut and padded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.config.packages import not_installed
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

    def __init__(self, entries: str | None, length: int, *, asked: str = "data.tokenizer") -> None:
        """Raises: RunnerError for a content that tokenizers can't read."""
        self.entries = None if entries is None else without_references(entries)
        self.length = length
        self._num_texts = self._num_cut = self._longest = 0
        self._tokenizer = None if entries is None else tokenizer_of(entries, asked=asked)
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

    def encode(self, content: bytes, *, asked: str) -> Tokens:
        """Raises: RunnerError for a text that is not UTF-8, or has an unknown character, with its position."""
        text = as_text(content, asked=asked)
        found = self._numbers[_code_points(text)]
        if len(found) and found.min() < 0:
            at = int((found < 0).argmax())
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            problem = f"{text[at]!r} in line {line:,}, column {column:,} is not one of the {self.size} characters of the training text"
            fix = "remove it, or train on text that contains it or with `data.tokens=bytes`"
            raise RunnerError.of(asked, problem, fix)
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

    def encode(self, content: bytes, *, asked: str) -> Tokens:
        return np.frombuffer(content, np.uint8).copy()

    def decode(self, tokens: Sequence[int]) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")


class Subwords:
    """The tokens of a tokenizer.json of the `tokenizers` library, without its special tokens. entries: its content."""

    kind = TOKENIZER

    def __init__(self, entries: str, *, asked: str = "data.tokens") -> None:
        self._tokenizer = tokenizer_of(entries, asked=asked)
        self.entries = without_references(entries)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1

    def encode(self, content: bytes, *, asked: str) -> Tokens:
        text = as_text(content, asked=asked)
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


def new_vocabulary(tokens: str, contents: Iterable[bytes], *, asked: str, key: str = "data.tokens") -> Vocabulary:
    """Return the vocabulary that `data.tokens` names; characters are those of the contents. Raises: RunnerError."""
    if tokens == BYTES:
        return Bytes()
    if tokens == CHARACTERS:
        is_there = np.zeros(NUM_CODE_POINTS, bool)
        for content in contents:
            is_there[_code_points(as_text(content, asked=asked))] = True
        return Characters([chr(code) for code in np.flatnonzero(is_there)])
    return Subwords(_content_of(tokens, KINDS, key=key), asked=f"{key}={tokens}")


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


def as_text(content: bytes, *, asked: str) -> str:
    """Decode UTF-8. Raises: RunnerError with the position of the first other byte."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"the file is not UTF-8: byte {error.start:,} (line {line:,}) is 0x{content[error.start]:02x}"
        raise RunnerError.of(asked, problem, "save the file as UTF-8, or use `data.tokens=bytes`") from None


def smallest(size: int) -> type[np.uint8] | type[np.int16] | type[np.int32]:
    return np.uint8 if size <= 2**8 else np.int16 if size <= 2**15 else np.int32


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def tokenizer_of(content: str, *, asked: str) -> Any:
    """Return the tokenizer of a tokenizer.json's content; it neither cuts nor pads. Raises: RunnerError."""
    try:
        from tokenizers import Tokenizer  # an optional package
    except ImportError:
        problem = "reading a `tokenizer.json` needs a package that is not installed"
        raise not_installed(asked, problem, "text") from None
    try:
        json.loads(content)
        found = Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exceptions
        problem = f"the file is not a `tokenizer.json`: {first_line(error)}"
        raise RunnerError.of(asked, problem, "use a file saved by tokenizers or transformers") from None
    found.no_truncation()
    found.no_padding()
    return found
