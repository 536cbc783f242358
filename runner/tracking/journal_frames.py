"""The bytes of a journal: frames with lengths and checksums, which are found again after damage."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"RJ1\n"
HEADER = struct.Struct("<4sIIII")  # magic, kind, bytes of the payload, points in it, checksum
SEARCHED_BYTES = 1 << 20


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


@dataclass(frozen=True)
class Survey:
    """The state of a file of frames."""

    end: int  # of the last complete record
    num_frames: int
    gaps: tuple[Gap, ...]  # damage before complete records
    tail: Gap  # after the last complete record; empty in an undamaged file
    is_foreign: bool  # not a file of frames


def encode(kind: int, payload: bytes, *, num_points: int) -> bytes:
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
