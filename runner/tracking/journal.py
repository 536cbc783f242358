"""Points and events of a run go in; one append-only file comes out that survives a kill at any byte."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import ArrayLike, NDArray

from runner.errors import Fault, RunnerError

MAGIC = b"RUN1"
HEAD = struct.Struct("<4scII")  # magic, kind, length and CRC-32 of what follows
EVENT, POINTS = b"E", b"P"


@dataclass(frozen=True)
class Points:
    """A rectangle of points, as it was measured."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]  # (n,)
    times_ms: NDArray[np.int64]  # (n,) since 1970; written once, so that sending them again changes nothing
    values: NDArray[np.float64]  # (n, k)


@dataclass(frozen=True)
class Record:
    """One entry: an event with its fields, or points. `end` is where the next begins."""

    end: int
    event: str
    data: dict[str, Any]
    points: Points | None = None


class Journal:
    """The one writer of a run's journal. Threads may share it.

    Each record goes to the file in one write and to the disk before the call returns, some 0.1 to 10 ms. A record that a
    kill cut off is removed when the journal is opened again.

    Raises: RunnerError when another process writes it; OSError when the disk is full, with the file as it was before.
    """

    def __init__(self, folder: Path) -> None:
        self.path = journal_path(folder)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._writer = FileLock(self.path.with_suffix(".lock"), timeout=0)
        try:
            self._writer.acquire()
        except Timeout:
            so = "another process is writing to that run at this moment"
            raise RunnerError(Fault(f"folder {folder}", so, "another folder, or wait for that process")) from None
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        self._size = 0
        for record in scan(self.path):
            self._size = record.end
        os.ftruncate(self._file, self._size)

    def event(self, event: str, **fields: Any) -> None:
        """Appends what happened; the fields are plain values."""
        self._append(EVENT, json.dumps({"event": event, **fields}).encode())

    def points(self, names: Sequence[str], steps: ArrayLike, times_ms: ArrayLike, values: ArrayLike) -> None:
        """Appends points: steps (n,), times_ms (n,), values (n, k) for k names."""
        columns = np.column_stack([np.asarray(steps, float), np.asarray(times_ms, float), np.asarray(values, float)])
        head = json.dumps(list(names)).encode()
        self._append(POINTS, struct.pack("<I", len(head)) + head + columns.astype("<f8").tobytes())

    def close(self) -> None:
        os.close(self._file)
        self._writer.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, kind: bytes, payload: bytes) -> None:
        record = HEAD.pack(MAGIC, kind, len(payload), zlib.crc32(payload)) + payload
        with self._lock:
            try:
                written = os.write(self._file, record)
                if written != len(record):
                    raise OSError(28, f"the disk took {written} of {len(record)} bytes", str(self.path))
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
            self._size += len(record)


def journal_path(folder: Path) -> Path:
    return folder / "journal" / "journal.bin"


def scan(path: Path, offset: int = 0) -> Iterator[Record]:
    """The whole, sound records from `offset` on; ends at one that is torn or still being written."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        while len(head := file.read(HEAD.size)) == HEAD.size:
            magic, kind, length, checksum = HEAD.unpack(head)
            if magic != MAGIC or len(payload := file.read(length)) < length or zlib.crc32(payload) != checksum:
                return
            offset += HEAD.size + length
            yield _record(kind, payload, offset)


def _record(kind: bytes, payload: bytes, end: int) -> Record:
    if kind == EVENT:
        data = json.loads(payload)
        return Record(end, data.pop("event"), data)
    (length,) = struct.unpack_from("<I", payload)
    names = tuple(json.loads(payload[4 : 4 + length]))
    columns = np.frombuffer(payload[4 + length :], "<f8").reshape(-1, 2 + len(names))
    points = Points(names, columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64), columns[:, 2:])
    return Record(end, "points", {}, points)


def read_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every point of a run by name, [(step, value), ...] in the order of measurement: for plots and for tests."""
    steps: dict[str, list[NDArray[np.int64]]] = {}
    values: dict[str, list[NDArray[np.float64]]] = {}
    for record in scan(journal_path(folder)):
        if record.points is not None:
            for column, name in enumerate(record.points.names):
                steps.setdefault(name, []).append(record.points.steps)
                values.setdefault(name, []).append(record.points.values[:, column])
    return {
        name: list(zip(np.concatenate(steps[name]).tolist(), np.concatenate(values[name]).tolist(), strict=True))
        for name in steps
    }


def read_events(folder: Path) -> list[Record]:
    """Every event of a run, in order."""
    return [record for record in scan(journal_path(folder)) if record.points is None]
