"""The journal of a run or a sweep: each record is on disk when its call returns.

The journal is the truth about a run, and a tracking server has a copy: a kill or a power cut loses at most the record
being written.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from numpy.typing import ArrayLike

from runner.errors import DeletedError, RunnerError
from runner.tracking.ack import FILE as ACK
from runner.tracking.ack import read_ack
from runner.tracking.journal_reader import read_points
from runner.tracking.journal_records import FILE, Gap, Points, Record, encode_event, encode_points, scan, survey

__all__ = ["Journal", "Points", "Record", "is_being_written", "is_held", "read_points", "scan"]

LOCK = "journal/journal.lock"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

_sync = getattr(os, "fdatasync", os.fsync)  # macOS and Windows have no fdatasync

log = logging.getLogger("runner")


class UnsyncedError(OSError):
    """The journal has the record, but syncing it to disk failed: don't append it again."""


class Journal:
    """The only writer of a run directory's journal; any thread may append. An existing journal is continued."""

    def __init__(self, folder: Path, *, wait_seconds: float = 10.0, say: Callable[[str], None] = log.warning) -> None:
        """Open or create folder/journal/journal.bin.

        An incomplete last record is cut off and stored in its own file; damage before complete records stays.

        Args:
            wait_seconds: How long to wait for another writer; a killed one releases its lock at once.
            say: Called with a line for each damage.

        Raises:
            RunnerError: If another process writes to it, or the file is not a journal or does not identify its run.
        """
        self.path = folder / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._turn = threading.Lock()
        self._fd = -1
        # flock on POSIX, msvcrt.locking on Windows: the system frees both when the process dies, even by SIGKILL
        self._lock = FileLock(folder / LOCK, thread_local=False)
        try:
            self._lock.acquire(timeout=wait_seconds)
        except Timeout:
            problem = "another process writes this run's journal"
            raise RunnerError.of(
                f"run folder {folder}", problem, "use another directory, or wait for that run"
            ) from None
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            self._end = self._settle(folder, say)
        except BaseException:
            self.close()
            raise

    def event(self, kind: str, **fields: Any) -> None:
        """Appends an event; its fields are what JSON can hold. 0.2 ms on an SSD.

        Raises: OSError when the disk does not take it; what the journal held before stays.
        """
        if kind == "points":
            raise ValueError("rows of points are appended with points()")
        self._append(encode_event(kind, fields))

    def points(self, names: Sequence[str], steps: ArrayLike, times_ms: ArrayLike, values: ArrayLike) -> None:
        """Appends rows: names (k,), steps (n,), times_ms (n,) since 1970, values (n, k). 0.2 ms on an SSD.

        Raises: OSError when the disk does not take it; what the journal held before stays.
        """
        self._append(encode_points(names, steps, times_ms, values))

    def blocks(self, blocks: Sequence[Points]) -> None:
        """Appends some blocks of rows and waits for the disk once, 0.4 ms of the 0.5 that a block takes.

        Raises: OSError when the disk does not take them, UnsyncedError when it has them and may lose them.
        """
        if blocks:
            self._append(b"".join(encode_points(each.names, each.steps, each.times_ms, each.values) for each in blocks))

    def close(self) -> None:
        """Lets the file go; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, record: bytes) -> None:
        with self._turn:
            if self._fd < 0:
                raise ValueError("the journal is closed")
            self._check_file()
            os.lseek(self._fd, self._end, os.SEEK_SET)  # not O_APPEND: what a failed write left behind is overwritten
            try:
                if os.write(self._fd, record) < len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
                raise self._refusal(error) from error
            self._end += len(record)  # also if the sync fails: a reader may have seen the record by now
            try:
                _sync(self._fd)
            except OSError as error:
                raise self._refusal(error, UnsyncedError) from error

    def _check_file(self) -> None:
        """Raises: DeletedError once for a file that was deleted, moved or cut; the next record is written all the same."""
        opened = os.fstat(self._fd)
        try:
            is_here = opened.st_nlink > 0 and os.path.samestat(opened, self.path.stat())
        except OSError:
            is_here = False
        if not is_here:
            self._write_again()
            raise DeletedError
        if opened.st_size < self._end:
            lost, self._end = self._end, survey(self.path).end
            os.ftruncate(self._fd, self._end)
            raise DeletedError(
                f"another process cut {self.path} from {lost:,} to {opened.st_size:,} bytes while the run trained; "
                "the points in the missing part are lost"
            )

    def _write_again(self) -> None:
        """Copy the journal to where it was. Raises: OSError when the disk does not take it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.parent.parent / LOCK, thread_local=False)
        lock.acquire(timeout=0)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.lseek(self._fd, 0, os.SEEK_SET)
        while block := os.read(self._fd, 1 << 20):
            while block:  # a disk that gets full takes a part of it
                block = block[os.write(fd, block) :]
        os.close(self._fd)
        self._lock.release()
        self._fd, self._lock = fd, lock

    def _refusal(self, error: OSError, kind: type[OSError] = OSError) -> OSError:
        text = f"the run's journal can't grow ({error.strerror}); what it held before is safe, make room on the disk"
        return kind(error.errno, text, str(self.path))

    def _settle(self, folder: Path, say: Callable[[str], None]) -> int:
        found = survey(self.path)
        if found.is_foreign:
            raise RunnerError.of(f"journal {self.path}", "the file is not a run's journal", "use another run directory")
        if found.gaps and found.gaps[0].offset == 0 and not any(record.kind == "start" for record in scan(self.path)):
            problem = "the first record, which identifies the run, is damaged: the journal can be read, not continued"
            moved = self.path.parent.with_name("journal-damaged")
            fix = f"run `mv {self.path.parent} {moved}`, then the same command, which continues as a new run in MLflow"
            raise RunnerError.of(f"journal {self.path}", problem, fix)
        acknowledged = read_ack(folder).offset
        for sentence in found.describe(acknowledged=acknowledged):
            say(f"{self.path}: {sentence}")
        if acknowledged > found.end:
            (folder / ACK).unlink()  # it is about records that are lost
        if found.tail.num_bytes:
            say(f"{self.path}: the incomplete record was moved to {self._move_tail(found.tail)}")
            os.ftruncate(self._fd, found.end)
        return found.end

    def _move_tail(self, tail: Gap) -> Path:
        with self.path.open("rb") as journal:
            journal.seek(tail.offset)
            torn = journal.read()
        names = (f"torn-{tail.offset}{f'-{number}' if number > 1 else ''}.bin" for number in itertools.count(1))
        file = next(path for path in map(self.path.with_name, names) if not path.exists())
        file.write_bytes(torn)
        return file


def find_damage(folder: Path) -> list[str]:
    """Return a sentence for each damage; [] without a journal. Reads all of it, about 1 s for 1 GB."""
    path = folder / FILE
    return survey(path).describe(acknowledged=read_ack(folder).offset) if path.is_file() else []


def is_being_written(folder: Path) -> bool:
    """Return whether a process has this run's journal open for writing."""
    return is_held(folder / LOCK)


def is_held(file: Path) -> bool:
    """Return whether a process holds this lock."""
    if not file.exists():
        return False
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError as error:
        if error.errno in NOT_WRITABLE:  # another user's, or a read-only disk
            return False
        raise
    lock.release()
    return False
