"""Opens token files as memory maps, and keeps what is known of them. Nothing is loaded whole.

A file is numbers alone (.bin, little-endian) or NumPy's (.npy, one row of whole numbers). Beside it, in FILE.json, lies
what is known of it: written with the file, or kept from one pass over it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.errors import Problem, RunnerError, first_line

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
        problem = f"token files end in {' or '.join(ENDINGS)}"
        raise RunnerError(Problem(asked, problem, "data=text for text files, or a file of runner.data.write_tokens"))
    if file.suffix == ".npy":
        return _opened_npy(file, asked)
    told = _of_this_size(file, None if dtype else asked)
    dtype = dtype or (told.dtype if told else "uint16")
    if dtype not in DTYPES:
        problem = f"tokens in a .bin are {', '.join(DTYPES)}"
        raise RunnerError(Problem(f"data.dtype={dtype}", problem, " or ".join(f"data.dtype={name}" for name in DTYPES)))
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        problem = (
            f"its {size:,} bytes are no whole number of {dtype} tokens, {width} bytes each" if size else "it is empty"
        )
        raise RunnerError(Problem(asked, problem, "the whole file, or data.dtype= as it was written"))
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
            problem = f"the number at position {start + at:,} is {part[at]:,}"
            raise RunnerError(Problem(asked, problem, "tokens of 0 or more"))
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
        problem = f"it can't be read as .npy: {first_line(error)}"
        raise RunnerError(Problem(asked, problem, "a whole file, saved by numpy")) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        problem = f"it holds {tokens.dtype} of shape {tokens.shape}"
        raise RunnerError(Problem(asked, problem, "one row of whole numbers, (N,)"))
    return tokens, tokens.dtype.name


def _noted(file: Path) -> Known | None:
    try:
        return Known(**json.loads(_beside(file).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _of_this_size(file: Path, asked: str | None = None) -> Known | None:
    """What FILE.json says, where it is of a file of this size.

    asked: by a person who says nothing of the type. Raises: RunnerError where the type that was written is of another file.
    """
    found, num_bytes = _noted(file), file.stat().st_size
    if found is None or (found.reader is not None and not {"tokens", "entries"} <= set(found.reader)):
        return None
    if found.num_bytes == num_bytes:
        return found
    if found.reader is not None and asked is not None:
        problem = (
            f"{_beside(file).name} was written with a file of {found.num_bytes:,} bytes, and this one has {num_bytes:,}"
        )
        fix = f"the file that it was written with, or data.dtype={found.dtype} if this one's tokens are of that type"
        raise RunnerError(Problem(asked, problem, fix))
    return None


def _may_keep(file: Path, found: Known) -> bool:
    """Not over a file of that name that may be another program's, nor over a vocabulary."""
    before = _noted(file)
    if before is None:
        return not os.path.lexists(_beside(file))
    return before.reader is None or found.reader is not None


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _beside(file: Path) -> Path:
    return file.with_name(file.name + ".json")
