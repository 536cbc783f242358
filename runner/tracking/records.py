"""Events and rows of points go in; a journal's bytes come out, and its records again, up to a torn tail."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

FILE = "journal/journal.bin"  # in a run's folder

MAGIC = b"RJ1\n"
HEADER = struct.Struct("<4sIIII")  # magic, EVENT or POINTS, bytes of the payload, points in it, checksum
EVENT, POINTS = 1, 2
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Points:
    """A window of rows: n steps of k values each."""

    names: tuple[str, ...]  # (k,)
    steps: NDArray[np.int64]  # (n,)
    times_ms: NDArray[np.int64]  # (n,) since 1970
    values: NDArray[np.float64]  # (n, k)


@dataclass(frozen=True)
class Record:
    """One entry of a journal; the next one begins at `end`. `kind` is "points" or an event's own."""

    offset: int
    end: int
    kind: str
    data: dict[str, Any] | Points

    @property
    def num_points(self) -> int:
        return int(self.data.values.size) if isinstance(self.data, Points) else 0


def encode_event(kind: str, fields: dict[str, Any]) -> bytes:
    """One record. Raises: TypeError for a field that JSON can't hold."""
    return _frame(EVENT, json.dumps({"kind": kind, **fields}).encode(), num_points=0)


def encode_points(names: Sequence[str], steps: ArrayLike, times_ms: ArrayLike, values: ArrayLike) -> bytes:
    """One record: its names, then a table of float64 with the columns step, time_ms and one for each name.

    A step and a time in milliseconds are whole numbers that float64 holds exactly (up to 2**53).
    """
    table = np.column_stack([np.asarray(part, dtype="<f8") for part in (steps, times_ms, values)])
    if table.shape[1] != len(names) + 2:
        raise ValueError(f"{len(names)} names for {table.shape[1] - 2} columns of values")
    head = json.dumps(list(names)).encode()
    return _frame(POINTS, _LENGTH.pack(len(head)) + head + table.tobytes(), num_points=len(table) * len(names))


def scan(path: Path, offset: int = 0) -> Iterator[Record]:
    """The complete records from `offset` (a record's beginning) on; stops at the end, or at a torn or unfinished tail.

    Raises: ValueError when `offset` lies behind the file's end: it came from another file.
    """
    with path.open("rb") as file:
        for start, end, kind, payload in _frames(file, offset):
            if kind == POINTS:
                yield Record(start, end, "points", _decode_points(payload))
            else:
                fields = json.loads(payload)
                yield Record(start, end, fields.pop("kind"), fields)


def count_points(path: Path, offset: int = 0) -> int:
    """How many points lie from `offset` on; reads the headers alone, about 2 us a record."""
    if not path.is_file():
        return 0
    total = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(min(offset, size))
        while len(head := file.read(HEADER.size)) == HEADER.size:
            magic, _, length, num_points, _ = HEADER.unpack(head)
            if magic != MAGIC or file.tell() + length > size:
                break
            total += num_points
            file.seek(length, os.SEEK_CUR)
    return total


def has_records(path: Path, offset: int = 0) -> bool:
    """Whether there is a complete record in the file from `offset` on, or a file at all."""
    return path.is_file() and path.stat().st_size > offset and next(scan(path, offset), None) is not None


def begins_record(path: Path, offset: int) -> bool:
    """Whether a record begins at `offset`, or will: the file's end counts."""
    if not path.is_file() or offset > path.stat().st_size:
        return offset == 0
    with path.open("rb") as file:
        file.seek(offset)
        return MAGIC.startswith(file.read(len(MAGIC)))


def sound_end(path: Path) -> int:
    """Where the last complete record ends; reads the whole file. -1 for a file that is no journal."""
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
        if not MAGIC.startswith(begin) and begin.strip(b"\0"):  # a power cut may leave zeros
            return -1
        end = 0
        for frame in _frames(file, 0):
            end = frame[1]
    return end


def _frame(kind: int, payload: bytes, *, num_points: int) -> bytes:
    return HEADER.pack(MAGIC, kind, len(payload), num_points, _checksum(kind, num_points, payload)) + payload


def _frames(file: BinaryIO, offset: int) -> Iterator[tuple[int, int, int, bytes]]:
    """(beginning, end, kind, payload) of each sound record."""
    size = os.fstat(file.fileno()).st_size
    if offset > size:
        raise ValueError(f"the journal has {size} bytes, and the record at {offset} is asked for")
    file.seek(offset)
    while len(head := file.read(HEADER.size)) == HEADER.size:
        magic, kind, length, num_points, checksum = HEADER.unpack(head)
        end = offset + HEADER.size + length
        if magic != MAGIC or end > os.fstat(file.fileno()).st_size:  # before reading: a torn length may say 4 GiB
            return
        payload = file.read(length)
        if len(payload) < length or _checksum(kind, num_points, payload) != checksum:
            return
        yield offset, end, kind, payload
        offset = end


def _decode_points(payload: bytes) -> Points:
    (length,) = _LENGTH.unpack_from(payload)
    begin = _LENGTH.size + length
    names = tuple(json.loads(payload[_LENGTH.size : begin]))
    table = np.frombuffer(payload, dtype="<f8", offset=begin).reshape(-1, len(names) + 2)
    return Points(names, table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2:])


def _checksum(kind: int, num_points: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<II", kind, num_points)))
