"""Makes a Source of a token file of any size, read one batch at a time: `data=tokens`. Writes token files, too."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.checks import choice
from runner.data.language.text import TextReader, found_files
from runner.data.language.vocabulary import Characters, Vocabulary, asked_for, vocabulary
from runner.data.language.windows import ChunkWindows, check_windows, facts_of_tokens, num_windows, rows_of
from runner.data.source import Source
from runner.errors import RunnerError, first_line

ENDINGS = (".bin", ".npy")
DTYPES = ("uint8", "uint16", "uint32")
TOKENS_A_PASS = 2**22


@dataclass(frozen=True)
class Known:
    """What FILE.json says. It counts as long as the file has this size: a copy has another time of change, for which its
    greatest token is found anew."""

    num_bytes: int
    modified_ns: int
    dtype: str
    greatest: int  # of its tokens
    greatest_at: int  # the first place where it stands
    reader: dict[str, Any] | None = None  # the vocabulary that it was written with: kind and entries
    bytes_per_token: float | None = None


def mapped(file: Path, dtype: str) -> NDArray[Any]:
    """(N,) of the file's own type, read-only."""
    if file.suffix == ".npy":
        found: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        return found
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")


def opened(file: Path, dtype: str | None, *, asked: str) -> tuple[NDArray[Any], str]:
    """The file's tokens, mapped, and their type. dtype: of a .bin; None: as FILE.json says, else uint16.

    Raises: RunnerError for an ending, a size or a content that no such file has.
    """
    if file.suffix not in ENDINGS:
        problem = f"token files must end in {' or '.join(ENDINGS)}"
        raise RunnerError.of(asked, problem, "use `data=text` for text files, or a file of `runner.data.write_tokens`")
    if file.suffix == ".npy":
        return _opened_npy(file, asked)
    told = _of_this_size(file, None if dtype else asked)
    dtype = dtype or (told.dtype if told else "uint16")
    choice(dtype, DTYPES, key="data.dtype")
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        problem = (
            f"`{file.name}` has {size:,} bytes, which is no multiple of {width}, the size of a {dtype} token"
            if size
            else f"`{file.name}` is empty"
        )
        raise RunnerError.of(asked, problem, "use the complete file, or the `data.dtype` it was written with")
    return mapped(file, dtype), dtype


def known(file: Path, tokens: NDArray[Any], dtype: str, *, asked: str) -> Known:
    """What the file holds: from FILE.json, or by one pass over it, which FILE.json then keeps where it can be written.

    Raises: RunnerError for a number below 0.
    """
    told = remembered(file, dtype)
    if told is not None and told.modified_ns == _state(file)[1]:
        return told
    greatest, at = -1, 0
    for start in range(0, len(tokens), TOKENS_A_PASS):
        part = tokens[start : start + TOKENS_A_PASS]
        if part.dtype.kind == "i" and part.min() < 0:
            at = int((part < 0).argmax())
            problem = f"the token at position {start + at:,} is {part[at]:,}"
            raise RunnerError.of(asked, problem, "use tokens of 0 or more")
        if (most := int(part.max())) > greatest:
            greatest, at = most, start + int(part.argmax())
    state = _state(file)
    found = replace(told, modified_ns=state[1], greatest=greatest, greatest_at=at) if told else None
    found = found or Known(*state, dtype, greatest, at)
    if _may_keep(file, found):
        with suppress(OSError):
            remember(file, found)
    return found


def remembered(file: Path, dtype: str) -> Known | None:
    """None where there is no FILE.json, or one of another file."""
    found = _of_this_size(file)
    return found if found is not None and found.dtype == dtype else None


def remember(file: Path, found: Known) -> None:
    """Whole, or as it was: a vocabulary lies nowhere else."""
    part = _beside(file).with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(asdict(found)) + "\n")
        part.replace(_beside(file))
    finally:
        part.unlink(missing_ok=True)


def written(file: Path, dtype: str, greatest: tuple[int, int], **more: Any) -> None:
    """Keeps what is known of a file that was just written."""
    remember(file, Known(*_state(file), dtype, *greatest, **more))


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


def _noted(file: Path) -> Known | None:
    try:
        return Known(**json.loads(_beside(file).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _of_this_size(file: Path, asked: str | None = None) -> Known | None:
    found, num_bytes = _noted(file), file.stat().st_size
    if found is None or (found.reader is not None and not {"tokens", "entries"} <= set(found.reader)):
        return None
    if found.num_bytes == num_bytes:
        return found
    if found.reader is not None and asked is not None:
        problem = f"`{_beside(file).name}` belongs to a file of {found.num_bytes:,} bytes, and `{file.name}` has {num_bytes:,}"
        fix = f"use the file that it belongs to, or `data.dtype={found.dtype}` if these tokens have that type"
        raise RunnerError.of(asked, problem, fix)
    return None


def _may_keep(file: Path, found: Known) -> bool:
    before = _noted(file)
    if before is None:
        return not os.path.lexists(_beside(file))
    return before.reader is None or found.reader is not None


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _beside(file: Path) -> Path:
    return file.with_name(file.name + ".json")


#: of a fingerprint: so many blocks of so many bytes, evenly spread
FINGERPRINT_BLOCKS, FINGERPRINT_BYTES = 256, 2**14


class TokenRows(Dataset[Any]):
    """Row i is a chunk around token i * T, as runner.data.language.windows.ChunkWindows takes it: (B, T + 1) or (B, 2 T + 1).

    Reading one costs its own pages of the file. In another process it maps the file anew.
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

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        chunks, most = self.__getitems__([index])
        return chunks[0], most[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch, ready: chunks in int32, which every device has, and how far each may be moved back."""
        length, back = self._length, self._length if self._is_random else 0
        chunks = np.zeros((len(indices), back + length + 1), np.int32)
        for row, index in zip(chunks, indices, strict=True):
            start = index * length - back
            row[max(0, -start) :] = self.tokens[max(0, start) : index * length + length + 1]
        most = [min(length - 1, index * length) for index in indices]
        return torch.from_numpy(chunks), torch.tensor(most)

    def collate_fn(self, batch: Any) -> Any:
        """A batch of `__getitems__` as it is, or rows put together."""
        if isinstance(batch, list):
            return tuple(torch.stack(parts) for parts in zip(*batch, strict=True))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}  # NumPy would send the content


READER = "runner.data.TokensReader"
#: of a prediction's block
TOKENS_A_BLOCK = 2**22
MOST_TOKENS = 2**31 - 1  # kinds: batches are int32


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
    """Windows of `context_length` tokens and the tokens that follow, from a memory-mapped .bin or .npy.

    vocab_size: tokens lie below it; None: what the file was written with, else its greatest token and one more, found
    by one pass that FILE.json keeps. windows: random (in training each is moved by chance, once an epoch), or
    sequential. dtype: of a .bin (None: what it was written with, else uint16). tokenizer: a tokenizer.json or `bytes`,
    to read and write text with (None: what the file was written with). like: an earlier run's reader.
    Raises: RunnerError for a file that is missing or none, and for a token that is not below vocab_size.
    """
    (file,) = found_files(path, key="data.path", most=1)
    asked = f"data.path={path}"
    numbers, dtype = opened(file, dtype, asked=asked)
    told = known(file, numbers, dtype, asked=asked)
    if like is not None:
        vocab_size, context_length = like["vocab_size"], like["context_length"]
    words = _vocabulary(told, tokenizer)
    size = _vocab_size(vocab_size, told, words)
    check_windows(context_length, windows, num_tokens=len(numbers), path=path)
    is_random = windows == "random"
    return Source(
        "tokens",
        TokenRows(file, dtype, context_length, is_random=is_random),
        facts_of_tokens(size, context_length, bytes_per_token=told.bytes_per_token),
        origin=f"{path}: {len(numbers):,} tokens, {size:,} kinds",
        finish=ChunkWindows(context_length, is_random=is_random),
        reader=like or _node(words, size, context_length, dtype),
        in_order=True,
    )


def write_tokens(texts: Iterable[str], path: str | Path, tokenizer: str = "bytes") -> int:
    """Writes the texts' tokens, end to end, as a .bin that data=tokens reads; returns how many there are.

    tokenizer: `bytes`, `characters` (those of all texts, which are then held in memory), or a tokenizer.json. One text
    is in memory at a time. Tokens take 2 bytes, or 4 where there are over 65,536 kinds.
    Raises: RunnerError for another ending than .bin, and for texts without a token.
    """
    file = Path(path)
    if file.suffix != ".bin":
        raise RunnerError.suggest(
            f"path={path}", "`write_tokens` writes files that end in `.bin`", [f"path={file.with_suffix('.bin')}"]
        )
    needs_all = tokenizer == Characters.kind
    texts = list(texts) if needs_all else texts
    contents = (text.encode() for text in texts) if needs_all else ()
    words = asked_for(tokenizer, contents, asked=f"path={path}", key="tokenizer")
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
    written(file, dtype.name, greatest, reader=node, bytes_per_token=num_bytes / num_tokens)
    return num_tokens


class TokensReader:
    """Reads token files, and text where a vocabulary is known, as windows for prediction; turns tokens back into text."""

    def __init__(
        self, vocab_size: int, context_length: int, dtype: str, tokens: str | None = None, entries: Any = None
    ) -> None:
        self.vocab_size, self.context_length, self._dtype = vocab_size, context_length, dtype
        self._text = None if tokens is None else TextReader(tokens, entries, context_length)

    def __call__(self, path: str) -> Tensor | Iterator[Tensor]:
        """(N, T) int64 of a text; of a token file an iterator of such, block by block. Raises: RunnerError."""
        if Path(path).suffix in ENDINGS:
            return self._blocks(path)
        if self._text is None:
            problem = "the run's tokens have no tokenizer, so text can't be read"
            raise RunnerError.of(f"--input {path}", problem, "use a token file, or a run with `data.tokenizer=...`")
        return self._text(path)

    def _blocks(self, path: str) -> Iterator[Tensor]:
        (file,) = found_files(path, key="--input", most=1)
        dtype = None if file.suffix == ".npy" else self._dtype
        asked = f"--input {path}"
        numbers, dtype = opened(file, dtype, asked=asked)
        told = known(file, numbers, dtype, asked=asked)
        _vocab_size(self.vocab_size, told, None, asked=asked)
        size = max(1, TOKENS_A_BLOCK // self.context_length) * self.context_length
        starts = range(0, max(1, len(numbers) - self.context_length + 1), size)
        last = starts[-1]
        return (
            rows_of(numbers[start : None if start == last else start + size], self.context_length) for start in starts
        )

    def encode(self, text: str) -> list[int]:
        """Raises: RunnerError where no vocabulary is known."""
        if self._text is None:
            problem = "the run's tokens have no tokenizer"
            raise RunnerError.of(f"the text {text[:40]!r}", problem, "use a run with `data.tokenizer=...`")
        return self._text.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, or the numbers where no vocabulary is known."""
        return " ".join(map(str, tokens)) if self._text is None else self._text.decode(tokens)


def _vocabulary(told: Known, tokenizer: str | None) -> Vocabulary | None:
    if tokenizer == Characters.kind:
        problem = "the token file doesn't say which characters its numbers are"
        fix = "use `data.tokenizer=null` with a file of `write_tokens(..., 'characters')`, which contains them"
        raise RunnerError.of(f"data.tokenizer={tokenizer}", problem, fix)
    if tokenizer is not None:
        return asked_for(tokenizer, (), asked=f"data.tokenizer={tokenizer}", key="data.tokenizer")
    return vocabulary(told.reader["tokens"], told.reader["entries"]) if told.reader else None


def _vocab_size(vocab_size: int | None, told: Known, words: Vocabulary | None, *, asked: str = "") -> int:
    size = vocab_size or max(told.greatest + 1, words.size if words else 0)
    if told.greatest >= min(size, MOST_TOKENS):
        problem = f"token {told.greatest:,} at position {told.greatest_at:,} is not below {min(size, MOST_TOKENS):,}"
        fits = f"use `data.vocab_size={told.greatest + 1}`, or " if told.greatest < MOST_TOKENS else "use "
        fix = f"{fits}the `data.dtype` the file was written with"
        raise RunnerError.of(asked or f"data.vocab_size={size}", problem, fix)
    return size


def _node(words: Vocabulary | None, vocab_size: int, context_length: int, dtype: str) -> dict[str, Any]:
    node = {"_target_": READER, "vocab_size": vocab_size, "context_length": context_length, "dtype": dtype}
    return node | ({"tokens": words.kind, "entries": words.entries} if words else {})
