"""The bytes of a journal: frames with lengths and checksums, found again around damage. For those who write one and read one."""

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
    """A whole record: its checksum is that of what is in it. The next one begins at `end`."""

    offset: int
    end: int
    kind: int
    num_points: int
    payload: bytes


@dataclass(frozen=True)
class Gap:
    """Bytes of a file that are no whole record, with a whole one behind them, or at the file's end."""

    offset: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.offset


@dataclass(frozen=True)
class Survey:
    """What a file of frames is worth."""

    end: int  # of the last whole record
    num_frames: int
    gaps: tuple[Gap, ...]  # damage with whole records behind it
    tail: Gap  # behind the last whole record; empty in a sound file
    is_foreign: bool  # it never was a file of frames


def encode(kind: int, payload: bytes, *, num_points: int) -> bytes:
    """One frame."""
    return HEADER.pack(MAGIC, kind, len(payload), num_points, _checksum(kind, num_points, payload)) + payload


def frames(path: Path, offset: int = 0) -> Iterator[Frame]:
    """The whole records from `offset` (a record's beginning) on, also those behind damage.

    Raises: ValueError when `offset` lies behind the file's end: it came from another file.
    """
    with path.open("rb", buffering=0) as file:  # a buffer would go on telling of a record that was half written
        size = os.fstat(file.fileno()).st_size
        if offset > size:
            raise ValueError(f"the journal has {size} bytes, and the record at {offset} is asked for")
        while (frame := _frame_at(file, offset) or _behind_damage(file, offset)) is not None:
            yield frame
            offset = frame.end


def survey(path: Path) -> Survey:
    """What is whole in the file and what is not; reads all of it, about 1 s for 1 GB."""
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
    if magic != MAGIC or end > os.fstat(file.fileno()).st_size:  # before reading: a torn length may say 4 GiB
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
            # it may have been no damage but a record that was just being written: once the next is there, it is whole
            return _frame_at(file, offset) or frame
        position += 1


def _checksum(kind: int, num_points: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<II", kind, num_points)))
