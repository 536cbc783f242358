"""Makes a Source of a token file of any size, read one batch at a time: `data=tokens`. Writes token files, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.config.checks import choice
from runner.data.language.text import (
    ChunkWindows,
    TextReader,
    check_windows,
    facts_of_tokens,
    find_files,
    num_windows,
    rows_of,
)
from runner.data.language.vocabulary import CHARACTERS, Vocabulary, new_vocabulary, vocabulary
from runner.data.map_style import BatchDataset
from runner.data.source import Source
from runner.errors import RunnerError, first_line

ENDINGS = (".bin", ".npy")
DTYPES = ("uint8", "uint16", "uint32")
READER = "runner.data.TokensReader"
#: the number and size of the evenly spread blocks that a fingerprint reads
FINGERPRINT_BLOCKS, FINGERPRINT_BYTES = 256, 2**14
#: tokens that are read at a time for the greatest one, and for a prediction
TOKENS_A_PASS = TOKENS_A_BLOCK = 2**22
MAX_TOKENS = 2**31 - 1  # batches are int32


@dataclass(frozen=True)
class Description:
    """FILE.json, which write_tokens() writes next to FILE."""

    num_bytes: int
    modified_ns: int
    dtype: str
    greatest: int  # of its tokens
    greatest_at: int  # its first position
    reader: dict[str, Any]  # the vocabulary: kind and entries
    bytes_per_token: float | None = None


def description_of(file: Path) -> Description | None:
    """Return FILE.json, if write_tokens() has written one."""
    try:
        found = Description(**json.loads(file.with_name(f"{file.name}.json").read_text()))
        return found if {"tokens", "entries"} <= set(found.reader) else None
    except (OSError, ValueError, TypeError):
        return None


def describe(file: Path, dtype: str, greatest: tuple[int, int], reader: dict[str, Any], bytes_per_token: float) -> None:
    """Write FILE.json of a file that is complete."""
    state = file.stat()
    found = Description(state.st_size, state.st_mtime_ns, dtype, *greatest, reader, bytes_per_token)
    file.with_name(f"{file.name}.json").write_text(json.dumps(asdict(found)) + "\n")


def mapped(file: Path, dtype: str) -> NDArray[Any]:
    if file.suffix == ".npy":
        found: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        return found
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")


def opened(file: Path, dtype: str | None, *, asked: str) -> tuple[NDArray[Any], str]:
    """Return the file's tokens, mapped, and their type. dtype: of a .bin; None: as in FILE.json, or uint16. Raises: RunnerError."""
    if file.suffix not in ENDINGS:
        problem = f"token files must end in {' or '.join(ENDINGS)}"
        raise RunnerError.of(asked, problem, "use `data=text` for text files, or a file of `runner.data.write_tokens`")
    if file.suffix == ".npy":
        return _opened_npy(file, asked)
    size, description = file.stat().st_size, description_of(file)
    if description is not None and dtype is None and description.num_bytes != size:
        problem = (
            f"`{file.name}.json` belongs to a file of {description.num_bytes:,} bytes, and `{file.name}` has {size:,}"
        )
        fix = f"use the file that it belongs to, or `data.dtype={description.dtype}` if these tokens have that type"
        raise RunnerError.of(asked, problem, fix)
    dtype = dtype or (description.dtype if description else "uint16")
    choice(dtype, DTYPES, key="data.dtype")
    width = np.dtype(dtype).itemsize
    if size == 0 or size % width:
        problem = f"`{file.name}` has {size:,} bytes, and a {dtype} token has {width}"
        raise RunnerError.of(asked, problem, "use the complete file, or the `data.dtype` it was written with")
    return mapped(file, dtype), dtype


def greatest_token(file: Path, tokens: NDArray[Any], dtype: str, *, asked: str) -> tuple[int, int]:
    """Return the greatest token and its first position, from FILE.json or by one pass. Raises: RunnerError for one below 0."""
    state, description = file.stat(), description_of(file)
    known = description and (description.num_bytes, description.modified_ns, description.dtype)
    if description and known == (state.st_size, state.st_mtime_ns, dtype):
        return description.greatest, description.greatest_at
    greatest, at = -1, 0
    for start in range(0, len(tokens), TOKENS_A_PASS):
        part = tokens[start : start + TOKENS_A_PASS]
        if part.dtype.kind == "i" and part.min() < 0:
            at = int((part < 0).argmax())
            problem = f"the token at position {start + at:,} is {part[at]:,}"
            raise RunnerError.of(asked, problem, "use tokens of 0 or more")
        if (most := int(part.max())) > greatest:
            greatest, at = most, start + int(part.argmax())
    return greatest, at


def _opened_npy(file: Path, asked: str) -> tuple[NDArray[Any], str]:
    try:
        tokens = mapped(file, "")
    except (ValueError, OSError, EOFError) as error:
        problem = f"`{file.name}` can't be read as `.npy`: {first_line(error)}"
        raise RunnerError.of(asked, problem, "use a complete file, saved by numpy") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        problem = f"`{file.name}` contains {tokens.dtype} of shape {tokens.shape}"
        raise RunnerError.of(asked, problem, "use one row of whole numbers, (N,)")
    return tokens, tokens.dtype.name


class TokenRows(BatchDataset):
    """Row i is the chunk around token i * T that ChunkWindows takes: (B, T + 1) or (B, 2 T + 1) int32.

    Reading one costs its own pages of the file. A worker process maps the file itself.
    """

    def __init__(self, file: Path, dtype: str, context_length: int, *, is_random: bool) -> None:
        self._file, self._dtype, self._length, self._is_random = file.resolve(), dtype, context_length, is_random
        self._tokens: NDArray[Any] | None = None
        self._num_rows = num_windows(len(self.tokens), context_length)

    @property
    def tokens(self) -> NDArray[Any]:
        if self._tokens is None:
            self._tokens = mapped(self._file, self._dtype)
        return self._tokens

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its size and of 256 blocks of it: 4 MiB are read."""
        content = self.tokens.view(np.uint8)
        digest = hashlib.sha256(f"{self._dtype} {len(content)} {self._length}".encode())
        step = max(1, (len(content) - FINGERPRINT_BYTES) // (FINGERPRINT_BLOCKS - 1))
        for start in range(0, len(content), max(step, FINGERPRINT_BYTES)):
            digest.update(content[start : start + FINGERPRINT_BYTES].tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._num_rows

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return chunks, and by how many tokens the window of each may be moved back."""
        length, back = self._length, self._length if self._is_random else 0
        chunks = np.zeros((len(indices), back + length + 1), np.int32)
        for row, index in zip(chunks, indices, strict=True):
            start = index * length - back
            row[max(0, -start) :] = self.tokens[max(0, start) : index * length + length + 1]
        most = [min(length - 1, index * length) for index in indices]
        return torch.from_numpy(chunks), torch.tensor(most)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}  # NumPy would pickle the content


def tokens(
    path: str,
    *,
    vocab_size: int | None = None,
    context_length: int = 1024,
    windows: str = "random",
    dtype: str | None = None,
    tokenizer: str | None = None,
    like: dict[str, Any] | None = None,
) -> Source:
    """Return windows of `context_length` tokens and the tokens that follow, from a memory-mapped .bin or .npy.

    The arguments are explained in conf/data/tokens.yaml. like: the reader of an earlier run.

    Raises:
        RunnerError: The file is missing or is not a token file, or a token is not below vocab_size.
    """
    (file,) = find_files(path, key="data.path", most=1)
    asked = f"data.path={path}"
    numbers, dtype = opened(file, dtype, asked=asked)
    description, greatest = description_of(file), greatest_token(file, numbers, dtype, asked=asked)
    if description is not None and description.num_bytes != file.stat().st_size:
        description = None
    if like is not None:
        vocab_size, context_length = like["vocab_size"], like["context_length"]
    words = _vocabulary(description, tokenizer)
    size = _vocab_size(vocab_size, greatest, words)
    check_windows(context_length, windows, num_tokens=len(numbers), path=path)
    is_random = windows == "random"
    return Source(
        "tokens",
        TokenRows(file, dtype, context_length, is_random=is_random),
        facts_of_tokens(size, context_length, bytes_per_token=description.bytes_per_token if description else None),
        origin=f"{path}: {len(numbers):,} tokens, {size:,} kinds",
        finish=ChunkWindows(context_length, is_random=is_random),
        reader=like or _node(words, size, context_length, dtype),
        in_order=True,
    )


def write_tokens(texts: Iterable[str], path: str | Path, tokenizer: str = "bytes") -> int:
    """Write the texts' tokens, end to end, as a .bin that data=tokens reads; return their number. Raises: RunnerError.

    One text is in memory at a time. Tokens take 2 bytes, or 4 if there are over 65,536 kinds.

    Args:
        tokenizer: `bytes`, `characters` (those of all texts, which are then held in memory), or a tokenizer.json.
    """
    file = Path(path)
    if file.suffix != ".bin":
        raise RunnerError.suggest(
            f"path={path}", "`write_tokens` writes files that end in `.bin`", [f"path={file.with_suffix('.bin')}"]
        )
    texts = list(texts) if tokenizer == CHARACTERS else texts
    contents = (text.encode() for text in texts) if isinstance(texts, list) else ()
    words = new_vocabulary(tokenizer, contents, asked=f"path={path}", key="tokenizer")
    dtype = np.dtype("<u2" if words.size <= 2**16 else "<u4")
    num_tokens = num_bytes = 0
    greatest = (-1, 0)
    with file.open("wb") as stream:
        for text in texts:
            content = text.encode()
            numbers = words.encode(content, asked=f"path={path}")
            if len(numbers) and (most := int(numbers.max())) > greatest[0]:
                greatest = most, num_tokens + int(numbers.argmax())
            stream.write(numbers.astype(dtype).tobytes())
            num_tokens, num_bytes = num_tokens + len(numbers), num_bytes + len(content)
    if not num_tokens:
        raise RunnerError.of(f"path={path}", "the texts have no tokens", "use texts that are not empty")
    node = {"tokens": words.kind, "entries": words.entries}
    describe(file, dtype.name, greatest, node, num_bytes / num_tokens)
    return num_tokens


class TokensReader:
    """Read token files, and texts if a vocabulary is known, as windows for predictions; turn tokens back into text."""

    def __init__(
        self, vocab_size: int, context_length: int, dtype: str, tokens: str | None = None, entries: Any = None
    ) -> None:
        self.vocab_size, self.context_length, self._dtype = vocab_size, context_length, dtype
        self._text = None if tokens is None else TextReader(tokens, entries, context_length)

    def __call__(self, path: str) -> Tensor | Iterator[Tensor]:
        """Return (N, T) int64 for a text, and an iterator of blocks for a token file. Raises: RunnerError."""
        if Path(path).suffix in ENDINGS:
            return self._blocks(path)
        if self._text is None:
            problem = "the run's tokens have no tokenizer, so text can't be read"
            raise RunnerError.of(f"--input {path}", problem, "use a token file, or a run with `data.tokenizer=...`")
        return self._text(path)

    def _blocks(self, path: str) -> Iterator[Tensor]:
        (file,) = find_files(path, key="--input", most=1)
        dtype = None if file.suffix == ".npy" else self._dtype
        asked = f"--input {path}"
        numbers, dtype = opened(file, dtype, asked=asked)
        greatest = greatest_token(file, numbers, dtype, asked=asked)
        _vocab_size(self.vocab_size, greatest, None, asked=asked)
        size = max(1, TOKENS_A_BLOCK // self.context_length) * self.context_length
        starts = range(0, max(1, len(numbers) - self.context_length + 1), size)
        last = starts[-1]
        return (
            rows_of(numbers[start : None if start == last else start + size], self.context_length) for start in starts
        )

    def encode(self, text: str) -> list[int]:
        if self._text is None:
            problem = "the run's tokens have no tokenizer"
            raise RunnerError.of(f"the text {text[:40]!r}", problem, "use a run with `data.tokenizer=...`")
        return self._text.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; the numbers if no vocabulary is known."""
        return " ".join(map(str, tokens)) if self._text is None else self._text.decode(tokens)


def _vocabulary(description: Description | None, tokenizer: str | None) -> Vocabulary | None:
    if tokenizer == CHARACTERS:
        problem = "the token file doesn't say which characters its numbers are"
        fix = "use `data.tokenizer=null` with a file of `write_tokens(..., 'characters')`, which contains them"
        raise RunnerError.of(f"data.tokenizer={tokenizer}", problem, fix)
    if tokenizer is not None:
        return new_vocabulary(tokenizer, (), asked=f"data.tokenizer={tokenizer}", key="data.tokenizer")
    return vocabulary(description.reader["tokens"], description.reader["entries"]) if description else None


def _vocab_size(vocab_size: int | None, greatest: tuple[int, int], words: Vocabulary | None, *, asked: str = "") -> int:
    token, position = greatest
    size = vocab_size or max(token + 1, words.size if words else 0)
    if token >= min(size, MAX_TOKENS):
        problem = f"token {token:,} at position {position:,} is not below {min(size, MAX_TOKENS):,}"
        fits = f"use `data.vocab_size={token + 1}`, or " if token < MAX_TOKENS else "use "
        fix = f"{fits}the `data.dtype` the file was written with"
        raise RunnerError.of(asked or f"data.vocab_size={size}", problem, fix)
    return size


def _node(words: Vocabulary | None, vocab_size: int, context_length: int, dtype: str) -> dict[str, Any]:
    node = {"_target_": READER, "vocab_size": vocab_size, "context_length": context_length, "dtype": dtype}
    return node | ({"tokens": words.kind, "entries": words.entries} if words else {})
