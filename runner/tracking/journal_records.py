"""The contents of a journal's frames: events, and rows of points."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runner.tracking import journal_frames

FILE = "journal/journal.bin"  # in a run's folder

EVENT, POINTS = 1, 2
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Points:
    """Rows of points: n steps of k values each."""

    names: tuple[str, ...]  # (k,)
    steps: NDArray[np.int64]  # (n,)
    times_ms: NDArray[np.int64]  # (n,) since 1970
    values: NDArray[np.float64]  # (n, k)


@dataclass(frozen=True)
class Record:
    """One entry of a journal; the next one begins at `end`. `kind` is "points" or the kind of an event."""

    offset: int
    end: int
    kind: str
    data: dict[str, Any] | Points

    @property
    def num_points(self) -> int:
        return int(self.data.values.size) if isinstance(self.data, Points) else 0


def encode_event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return a record. Raises: TypeError for a field that JSON does not support."""
    return journal_frames.encode(EVENT, json.dumps({"kind": kind, **fields}).encode(), num_points=0)


def encode_points(names: Sequence[str], steps: ArrayLike, times_ms: ArrayLike, values: ArrayLike) -> bytes:
    """Return a record: the names, then a table of float64 with the columns step, time_ms and one per name.

    Steps and times in milliseconds are integers below 2**53, which float64 holds exactly.
    """
    table = np.column_stack([np.asarray(part, dtype="<f8") for part in (steps, times_ms, values)])
    if table.shape[1] != len(names) + 2:
        raise ValueError(f"{len(names)} names for {table.shape[1] - 2} columns of values")
    head = json.dumps(list(names)).encode()
    return journal_frames.encode(
        POINTS, _LENGTH.pack(len(head)) + head + table.tobytes(), num_points=len(table) * len(names)
    )


def scan(path: Path, offset: int = 0) -> Iterator[Record]:
    """Yield the complete records from `offset` (the start of a record) on, also those after damage.

    Raises:
        ValueError: If `offset` is after the end of the file.
    """
    for frame in journal_frames.frames(path, offset):
        if frame.kind == POINTS:
            yield Record(frame.offset, frame.end, "points", _decode_points(frame.payload))
        else:
            fields = json.loads(frame.payload)
            yield Record(frame.offset, frame.end, fields.pop("kind"), fields)


def scan_events(path: Path, *, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the fields and the `kind` of each event before `end` (None: of all); skips points."""
    for frame in journal_frames.frames(path):
        if end is not None and frame.offset >= end:
            return
        if frame.kind == EVENT:
            fields: dict[str, Any] = dict(json.loads(frame.payload))
            yield {"kind": fields.pop("kind"), **fields}


def scan_names(path: Path, end: int | None = None) -> Iterator[str]:
    """Yield the names of the points before `end` (None: of all), each once, in the order of writing; skips values."""
    known: set[tuple[str, ...]] = set()
    found: set[str] = set()
    for frame in journal_frames.frames(path) if end != 0 else ():
        if end is not None and frame.offset >= end:
            return
        if frame.kind == POINTS and (names := _names_in(frame.payload)) not in known:
            known.add(names)
            new = [name for name in dict.fromkeys(names) if name not in found]
            found.update(new)
            yield from new


def count_points(path: Path, offset: int = 0) -> int:
    """Return the number of points from `offset` on; reads the rest of the file, about 1 s for 1 GB."""
    if not path.is_file() or offset > path.stat().st_size:
        return 0
    return sum(frame.num_points for frame in journal_frames.frames(path, offset))


def has_records(path: Path, offset: int = 0) -> bool:
    """Return whether the file exists and has a complete record from `offset` on."""
    return path.is_file() and path.stat().st_size > offset and next(scan(path, offset), None) is not None


def begins_record(path: Path, offset: int) -> bool:
    """Return whether a record begins at `offset`, or would at the end of the file."""
    if not path.is_file() or offset > path.stat().st_size:
        return offset == 0
    with path.open("rb") as file:
        file.seek(offset)
        return journal_frames.MAGIC.startswith(file.read(len(journal_frames.MAGIC)))


@functools.lru_cache(maxsize=256)
def _names(text: bytes) -> tuple[str, ...]:
    return tuple(json.loads(text))


def _names_in(payload: bytes) -> tuple[str, ...]:
    (length,) = _LENGTH.unpack_from(payload)
    return _names(payload[_LENGTH.size : _LENGTH.size + length])


def _decode_points(payload: bytes) -> Points:
    (length,) = _LENGTH.unpack_from(payload)
    begin = _LENGTH.size + length
    names = _names_in(payload)
    table = np.frombuffer(payload, dtype="<f8", offset=begin).reshape(-1, len(names) + 2)
    return Points(names, table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2:])
