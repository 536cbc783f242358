"""A journal's file: events and rows of points, in frames with lengths and checksums, which are found again after damage."""

from __future__ import annotations

import functools
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

EVENT, POINTS = 1, 2
_LENGTH = struct.Struct("<I")
MAGIC = b"RJ1\n"
HEADER = struct.Struct("<4sIIII")  # magic, kind, bytes of the payload, points in it, checksum
SEARCHED_BYTES = 1 << 20


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
    return encode_frame(EVENT, json.dumps({"kind": kind, **fields}).encode(), num_points=0)


def encode_points(names: Sequence[str], steps: ArrayLike, times_ms: ArrayLike, values: ArrayLike) -> bytes:
    """Return a record: the names, then a table of float64 with the columns step, time_ms and one per name.

    Steps and times in milliseconds are integers below 2**53, which float64 holds exactly.
    """
    table = np.column_stack([np.asarray(part, dtype="<f8") for part in (steps, times_ms, values)])
    if table.shape[1] != len(names) + 2:
        raise ValueError(f"{len(names)} names for {table.shape[1] - 2} columns of values")
    head = json.dumps(list(names)).encode()
    return encode_frame(POINTS, _LENGTH.pack(len(head)) + head + table.tobytes(), num_points=len(table) * len(names))


def scan(path: Path, offset: int = 0) -> Iterator[Record]:
    """Yield the complete records from `offset` (the start of a record) on, also those after damage.

    Raises:
        ValueError: If `offset` is after the end of the file.
    """
    for frame in frames(path, offset):
        if frame.kind == POINTS:
            yield Record(frame.offset, frame.end, "points", _decode_points(frame.payload))
        else:
            fields = json.loads(frame.payload)
            yield Record(frame.offset, frame.end, fields.pop("kind"), fields)


def scan_events(path: Path, *, end: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the fields and the `kind` of each event before `end` (None: of all); skips points."""
    for frame in frames(path):
        if end is not None and frame.offset >= end:
            return
        if frame.kind == EVENT:
            fields: dict[str, Any] = dict(json.loads(frame.payload))
            yield {"kind": fields.pop("kind"), **fields}


def scan_names(path: Path, end: int | None = None) -> Iterator[str]:
    """Yield the names of the points before `end` (None: of all), each once, in the order of writing; skips values."""
    known: set[tuple[str, ...]] = set()
    found: set[str] = set()
    for frame in frames(path) if end != 0 else ():
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
    return sum(frame.num_points for frame in frames(path, offset))


def has_records(path: Path, offset: int = 0) -> bool:
    """Return whether the file exists and has a complete record from `offset` on."""
    return path.is_file() and path.stat().st_size > offset and next(frames(path, offset), None) is not None


def begins_record(path: Path, offset: int) -> bool:
    """Return whether a record begins at `offset`, or would at the end of the file."""
    if not path.is_file() or offset > path.stat().st_size:
        return offset == 0
    with path.open("rb") as file:
        file.seek(offset)
        return MAGIC.startswith(file.read(len(MAGIC)))


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


@dataclass(frozen=True)
class Frame:
    """A complete record with a correct checksum. The next one begins at `end`."""

    offset: int
    end: int
    kind: int
    num_points: int
    payload: bytes


@dataclass(frozen=True)
class Gap:
    """Damaged bytes between complete records, or at the end of the file."""

    offset: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.offset

    def describe(self) -> str:
        where = f"{self.num_bytes:,} bytes from byte {self.offset:,} on"
        return f"the journal is damaged ({where}): these records are lost, those after them are not"


@dataclass(frozen=True)
class Survey:
    """The state of a file of frames."""

    end: int  # of the last complete record
    num_frames: int
    gaps: tuple[Gap, ...]  # damage before complete records
    tail: Gap  # after the last complete record; empty in an undamaged file
    is_foreign: bool  # not a file of frames

    def describe(self, *, acknowledged: int) -> list[str]:
        """Return a sentence for each damage. acknowledged: offset of the first record that MLflow does not have."""
        if self.is_foreign:
            return ["its journal.bin is not the journal of a run, and is not read"]
        sentences = [gap.describe() for gap in self.gaps]
        if self.tail.num_bytes:
            lost = "the journal's last record is incomplete or damaged, and lost"
            sentences.append(f"{lost} ({self.tail.num_bytes:,} bytes from byte {self.tail.offset:,} on)")
        if acknowledged > self.tail.end:
            sentences.append(
                f"the journal has lost its end: MLflow has {acknowledged:,} bytes of it, and {self.end:,} are left"
            )
        return sentences


def encode_frame(kind: int, payload: bytes, *, num_points: int) -> bytes:
    """Return a frame."""
    return HEADER.pack(MAGIC, kind, len(payload), num_points, _checksum(kind, num_points, payload)) + payload


def frames(path: Path, offset: int = 0) -> Iterator[Frame]:
    """Yield the complete records from `offset` (the start of a record) on, also those after damage.

    Raises:
        ValueError: If `offset` is after the end of the file.
    """
    with path.open("rb", buffering=0) as file:  # a buffer would keep a half-written record
        size = os.fstat(file.fileno()).st_size
        if offset > size:
            raise ValueError(f"the journal has {size} bytes, so there can't be a record at {offset}")
        while (frame := _frame_at(file, offset) or _behind_damage(file, offset)) is not None:
            yield frame
            offset = frame.end


def survey(path: Path) -> Survey:
    """Return which parts of the file are complete; reads all of it, about 1 s for 1 GB."""
    end, num_frames, gaps = 0, 0, []
    for frame in frames(path):
        if frame.offset > end:
            gaps.append(Gap(end, frame.offset))
        end, num_frames = frame.end, num_frames + 1
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
    is_foreign = not num_frames and not MAGIC.startswith(begin) and bool(begin.strip(b"\0"))  # a power cut leaves zeros
    return Survey(end, num_frames, tuple(gaps), Gap(end, max(end, path.stat().st_size)), is_foreign)


def _frame_at(file: BinaryIO, offset: int) -> Frame | None:
    file.seek(offset)
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    magic, kind, length, num_points, checksum = HEADER.unpack(head)
    end = offset + HEADER.size + length
    if magic != MAGIC or end > os.fstat(file.fileno()).st_size:  # before reading: a damaged length may be 4 GiB
        return None
    payload = file.read(length)
    if len(payload) < length or _checksum(kind, num_points, payload) != checksum:
        return None
    return Frame(offset, end, kind, num_points, payload)


def _behind_damage(file: BinaryIO, offset: int) -> Frame | None:
    position = offset + 1
    while True:
        file.seek(position)
        searched = file.read(SEARCHED_BYTES)
        found = searched.find(MAGIC)
        if found < 0:
            if len(searched) < SEARCHED_BYTES:
                return None
            position += len(searched) - len(MAGIC) + 1
            continue
        position += found
        frame = _frame_at(file, position)
        if frame is not None:
            # not damage if the record was just being written: it is complete when the next one exists
            return _frame_at(file, offset) or frame
        position += 1


def _checksum(kind: int, num_points: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<II", kind, num_points)))
