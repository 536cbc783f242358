"""Makes a Source of a token file of any size, read one batch at a time: `data=tokens`. Writes token files, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runner.config.checks import Count, one_of
from runner.data.conversion import BatchDataset
from runner.data.language.text import (
    CHARACTERS,
    Vocabulary,
    Windows,
    check_windows,
    facts_of_tokens,
    find_files,
    moved,
    new_vocabulary,
    num_windows,
    shifted,
    vocabulary,
)
from runner.data.source import Source
from runner.errors import RunnerError, first_line

ENDINGS = (".bin", ".npy")
Dtype = Annotated[str, one_of(("uint8", "uint16", "uint32"))]
READER = "runner.data.TokensReader"
#: the number and size of the evenly spread blocks that a fingerprint reads
FINGERPRINT_BLOCKS, FINGERPRINT_BYTES = 256, 2**14
#: tokens that are read at a time for the greatest one, and for a prediction
TOKENS_A_PASS = TOKENS_A_BLOCK = 2**22
MAX_TOKENS = 2**31 - 1  # batches are int32


@dataclass(frozen=True)
class TokenNote:
    """FILE.json, which write_tokens() writes next to FILE."""

    num_bytes: int
    modified_ns: int
    dtype: str
    greatest: int  # of its tokens
    greatest_at: int  # its first position
    reader: dict[str, Any]  # the vocabulary: kind and entries
    bytes_per_token: float | None = None


def read_note(file: Path) -> TokenNote | None:
    try:
        note = TokenNote(**json.loads(file.with_name(f"{file.name}.json").read_text()))
        return note if {"tokens", "entries"} <= set(note.reader) else None
    except (OSError, ValueError, TypeError):
        return None


def mapped(file: Path, dtype: str) -> NDArray[Any]:
    if file.suffix == ".npy":
        tokens: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        return tokens
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")


class TokenFile:
    """A mapped file of tokens, its type, and the note of write_tokens() that fits it."""

    def __init__(self, path: str, dtype: str | None, *, key: str) -> None:
        """dtype: of a .bin; None: as in its note, or uint16. Raises: RunnerError."""
        (self.path,) = find_files(path, key=key, most=1)
        self._setting = setting = f"{key}={path}" if key.startswith("data.") else f"{key} {path}"
        file, size, self.note = self.path, self.path.stat().st_size, read_note(self.path)
        if file.suffix not in ENDINGS:
            problem = f"token files must end in {' or '.join(ENDINGS)}"
            fix = "use `data=text` for text files, or a file of `runner.data.write_tokens`"
            raise RunnerError.of(setting, problem, fix)
        if self.note is not None and self.note.num_bytes != size:
            if file.suffix == ".bin" and dtype is None:
                problem = f"`{file.name}.json` belongs to a file of {self.note.num_bytes:,} bytes, and `{file.name}` has {size:,}"
                ours = f"`data.dtype={self.note.dtype}` if these tokens have that type"
                raise RunnerError.of(setting, problem, f"use the file that it belongs to, or {ours}")
            self.note = None
        if file.suffix == ".npy":
            self.tokens = _mapped_npy(file, setting)
            self.dtype = self.tokens.dtype.name
            return
        self.dtype = dtype or (self.note.dtype if self.note else "uint16")
        width = np.dtype(self.dtype).itemsize
        if size == 0 or size % width:
            problem = f"`{file.name}` has {size:,} bytes, and a {self.dtype} token has {width}"
            raise RunnerError.of(setting, problem, "use the complete file, or the `data.dtype` it was written with")
        self.tokens = mapped(file, self.dtype)

    def greatest(self) -> tuple[int, int]:
        """Return the greatest token and its first position, from the note or by one pass. Raises: RunnerError for one below 0."""
        note = self.note
        if note and (note.modified_ns, note.dtype) == (self.path.stat().st_mtime_ns, self.dtype):
            return note.greatest, note.greatest_at
        greatest, at = -1, 0
        for start in range(0, len(self.tokens), TOKENS_A_PASS):
            part = self.tokens[start : start + TOKENS_A_PASS]
            if part.dtype.kind == "i" and part.min() < 0:
                at = int((part < 0).argmax())
                problem = f"the token at position {start + at:,} is {part[at]:,}"
                raise RunnerError.of(self._setting, problem, "use tokens of 0 or more")
            if (most := int(part.max())) > greatest:
                greatest, at = most, start + int(part.argmax())
        return greatest, at


def _mapped_npy(file: Path, setting: str) -> NDArray[Any]:
    try:
        tokens = mapped(file, "")
    except (ValueError, OSError, EOFError) as error:
        problem = f"`{file.name}` can't be read as `.npy`: {first_line(error)}"
        raise RunnerError.of(setting, problem, "use a complete file, saved by numpy") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        problem = f"`{file.name}` contains {tokens.dtype} of shape {tokens.shape}"
        raise RunnerError.of(setting, problem, "use one row of whole numbers, (N,)")
    return tokens


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


class ChunkWindows(nn.Module):
    """The batch transform of `data=tokens`. Rows are chunks, (B, T + 1), or (B, 2 T + 1) for windows=random."""

    steps: Tensor

    def __init__(self, context_length: int, *, is_random: bool) -> None:
        super().__init__()
        self.context_length, self.num_draws = context_length, int(is_random)
        self.register_buffer("steps", torch.arange(context_length + 1))

    def forward(self, batch: tuple[Tensor, Tensor], draws: Tensor) -> tuple[Tensor, Tensor]:
        """batch: the chunks, and the maximum number of tokens that each window is moved back by, (B,) int64."""
        chunks, most = batch
        first = chunks.shape[1] - self.context_length - 1
        starts = torch.full_like(most, first)
        if draws.shape[1]:
            starts = starts - torch.minimum(moved(draws, self.context_length), most)
        return shifted(chunks.gather(1, starts[:, None] + self.steps))


def tokens(
    path: str,
    *,
    vocab_size: Count | None = None,
    context_length: Count = 1024,
    windows: Windows = "random",
    dtype: Dtype | None = None,
    tokenizer: str | None = None,
    like: dict[str, Any] | None = None,
) -> Source:
    """Return windows of `context_length` tokens and the tokens that follow, from a memory-mapped .bin or .npy.

    The arguments are explained in conf/data/tokens.yaml. like: the reader of an earlier run.

    Raises:
        RunnerError: The file is missing or is not a token file, or a token is not below vocab_size.
    """
    file = TokenFile(path, dtype, key="data.path")
    greatest = file.greatest()
    if like is not None:
        vocab_size, context_length = like["vocab_size"], like["context_length"]
    words = _vocabulary(file.note, tokenizer)
    size = _vocab_size(vocab_size, greatest, words)
    check_windows(context_length, num_tokens=len(file.tokens), path=path)
    is_random = windows == "random"
    return Source(
        "tokens",
        TokenRows(file.path, file.dtype, context_length, is_random=is_random),
        facts_of_tokens(size, context_length, bytes_per_token=file.note.bytes_per_token if file.note else None),
        origin=f"{path}: {len(file.tokens):,} tokens, {size:,} kinds",
        finish=ChunkWindows(context_length, is_random=is_random),
        reader=like or _node(words, size, context_length, file.dtype),
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
    words = new_vocabulary(tokenizer, contents, setting=f"path={path}", key="tokenizer")
    dtype = np.dtype("<u2" if words.size <= 2**16 else "<u4")
    num_tokens = num_bytes = 0
    greatest = (-1, 0)
    with file.open("wb") as stream:
        for text in texts:
            content = text.encode()
            numbers = words.encode(content, setting=f"path={path}")
            if len(numbers) and (most := int(numbers.max())) > greatest[0]:
                greatest = most, num_tokens + int(numbers.argmax())
            stream.write(numbers.astype(dtype).tobytes())
            num_tokens, num_bytes = num_tokens + len(numbers), num_bytes + len(content)
    if not num_tokens:
        raise RunnerError.of(f"path={path}", "the texts have no tokens", "use texts that are not empty")
    state, node = file.stat(), {"tokens": words.kind, "entries": words.entries}
    note = TokenNote(state.st_size, state.st_mtime_ns, dtype.name, *greatest, node, num_bytes / num_tokens)
    file.with_name(f"{file.name}.json").write_text(json.dumps(asdict(note)) + "\n")
    return num_tokens


class TextReader:
    """Read texts, if a vocabulary is known, and token files as windows for predictions; turn tokens back into text.

    tokens, entries: the vocabulary; None without one. vocab_size, dtype: of token files; None for a run on texts.
    """

    def __init__(
        self,
        tokens: str | None = None,
        entries: Any = None,
        context_length: int = 256,
        vocab_size: int | None = None,
        dtype: str | None = None,
    ) -> None:
        self._vocabulary = None if tokens is None else vocabulary(tokens, entries)
        self.context_length, self._dtype = context_length, dtype
        self.vocab_size = vocab_size or (self._vocabulary.size if self._vocabulary else 0)

    def __call__(self, path: str) -> Tensor | Iterator[Tensor]:
        """Return (N, T) int64 for a text, and an iterator of blocks for a token file. Raises: RunnerError."""
        if self._dtype is not None and Path(path).suffix in ENDINGS:
            return self._blocks(path)
        if self._vocabulary is None:
            problem = "the run's tokens have no tokenizer, so text can't be read"
            raise RunnerError.of(f"--input {path}", problem, "use a token file, or a run with `data.tokenizer=...`")
        (file,) = find_files(path, key="--input", most=1)
        numbers = self._vocabulary.encode(file.read_bytes(), setting=f"--input {path}")
        if not len(numbers):
            raise RunnerError.of(f"--input {path}", f"`{path}` is empty", "use a file with text")
        return rows_of(numbers, self.context_length)

    def _blocks(self, path: str) -> Iterator[Tensor]:
        file = TokenFile(path, None if path.endswith(".npy") else self._dtype, key="--input")
        _vocab_size(self.vocab_size, file.greatest(), None, setting=f"--input {path}")
        numbers, length = file.tokens, self.context_length
        size = max(1, TOKENS_A_BLOCK // length) * length
        starts = range(0, max(1, len(numbers) - length + 1), size)
        last = starts[-1]
        return (rows_of(numbers[start : None if start == last else start + size], length) for start in starts)

    def encode(self, text: str) -> list[int]:
        """Raises: RunnerError for unknown characters, or without a vocabulary."""
        shown = f"the text {text if len(text) <= 40 else f'{text[:40]}...'!r}"
        if self._vocabulary is None:
            raise RunnerError.of(shown, "the run's tokens have no tokenizer", "use a run with `data.tokenizer=...`")
        return [int(number) for number in self._vocabulary.encode(text.encode(), setting=shown)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; the numbers if no vocabulary is known."""
        return " ".join(map(str, tokens)) if self._vocabulary is None else self._vocabulary.decode(tokens)


class TokensReader(TextReader):
    """The name of a token file's reader in model.json."""


def rows_of(tokens: NDArray[Any], context_length: int) -> Tensor:
    """Return (N, T) int64 windows for predictions. The last one ends with the text; a shorter text is one row."""
    if len(tokens) <= context_length:
        return torch.from_numpy(tokens.astype(np.int64))[None]
    starts = np.append(np.arange(0, len(tokens) - context_length, context_length), len(tokens) - context_length)
    return torch.from_numpy(tokens[starts[:, None] + np.arange(context_length)].astype(np.int64))


def _vocabulary(note: TokenNote | None, tokenizer: str | None) -> Vocabulary | None:
    if tokenizer == CHARACTERS:
        problem = "the token file doesn't say which characters its numbers are"
        fix = "use `data.tokenizer=null` with a file of `write_tokens(..., 'characters')`, which contains them"
        raise RunnerError.of(f"data.tokenizer={tokenizer}", problem, fix)
    if tokenizer is not None:
        return new_vocabulary(tokenizer, (), setting=f"data.tokenizer={tokenizer}", key="data.tokenizer")
    return vocabulary(note.reader["tokens"], note.reader["entries"]) if note else None


def _vocab_size(
    vocab_size: int | None, greatest: tuple[int, int], words: Vocabulary | None, *, setting: str = ""
) -> int:
    token, position = greatest
    size = vocab_size or max(token + 1, words.size if words else 0)
    if token >= min(size, MAX_TOKENS):
        problem = f"token {token:,} at position {position:,} is not below {min(size, MAX_TOKENS):,}"
        fits = f"use `data.vocab_size={token + 1}`, or " if token < MAX_TOKENS else "use "
        fix = f"{fits}the `data.dtype` the file was written with"
        raise RunnerError.of(setting or f"data.vocab_size={size}", problem, fix)
    return size


def _node(words: Vocabulary | None, vocab_size: int, context_length: int, dtype: str) -> dict[str, Any]:
    node = {"_target_": READER, "vocab_size": vocab_size, "context_length": context_length, "dtype": dtype}
    return node | ({"tokens": words.kind, "entries": words.entries} if words else {})
