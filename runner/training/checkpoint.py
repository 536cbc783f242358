"""Writes a run's checkpoints to files, whole or not at all, in the background thread, and reads them back on the host.

For state.py, which knows what is in them; runs/load.py and experiment/figures.py call load(). CheckpointWriter keeps the
newest of each name in memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from runner.device import streams
from runner.device.host_memory import memory_left
from runner.device.placement import num_bytes
from runner.errors import DeletedError, Problem, RunnerError, first_line
from runner.training.background import Background
from runner.training.kept import Keeping, file_of, note, prune

#: behind the zip archive that torch writes, as its comment: the SHA-256 of all that stands before. torch itself reads an
#: altered file without a word: it checks no sums (2.13)
MARK = b"runner sha256 "
NUM_MARKED = len(MARK) + 64
NO_COMMENT = b"\0\0"
#: snapshots in pinned memory: two names, one taken while another is written, each rounded up to a power of two at most
PINNED_AT_ONCE = 8


class TornError(RunnerError):
    """A checkpoint that is not what was written."""


def snapshot(state: Any, into: Any = None, *, pinned: bool = False) -> Any:
    """The state with every tensor copied to the host, so that training may go on while it is written.

    into: an older snapshot that nobody needs; its tensors take the values where they fit. New memory costs five times
        the copy: 0.3 s instead of 0.05 s for 315 MB, as the system hands out each page at its first touch.
    pinned: into memory that a device copies to by itself: what comes from one is there after an event that follows. Else
        it waits for the device.
    """
    if isinstance(state, Tensor):
        fits = isinstance(into, Tensor) and into.shape == state.shape and into.dtype == state.dtype
        if pinned and state.device.type != "cpu":
            beside = into if fits and into.is_pinned() else torch.empty_like(state, device="cpu", pin_memory=True)
            return beside.copy_(state.detach(), non_blocking=True)
        return into.copy_(state.detach()) if fits else state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        older = into if isinstance(into, dict) else {}
        return {key: snapshot(value, older.get(key), pinned=pinned) for key, value in state.items()}
    if isinstance(state, list | tuple):
        fits = isinstance(into, list | tuple) and len(into) == len(state)
        return type(state)(snapshot(value, into[at] if fits else None, pinned=pinned) for at, value in enumerate(state))
    return state


@dataclass(frozen=True)
class Kept:
    """A snapshot, and the event after its copies to the host."""

    state: dict[str, Any]
    copied: torch.Event | None = None

    def whole(self) -> dict[str, Any]:
        """Returns the state; waits until it is on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.state


def save(state: dict[str, Any], path: Path) -> None:
    """Writes beside `path`, then renames: a reader or a crash meets the old file or the new one, never a half.

    What `path` was before is kept as NAME-before.pt. Costs a hash of the file beside the writing, some 1 s for 1 GB.
    Raises: OSError, a DeletedError where the folder goes meanwhile.
    """
    _in_place(_written(state, path), path)


def save_as_both(state: dict[str, Any], path: Path, other: Path) -> None:
    """Like save(), and `other` has the same content, before `path` has it; the disk keeps it once where it has links."""
    _in_place(_written(state, other), other, keeps_older=False)
    beside = path.with_suffix(".writing")
    _also_as(beside, other)
    _in_place(beside, path)


def _written(state: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    try:
        with beside.open("w+b") as file:
            hashing = _Hashing(file)
            try:
                torch.save(state, hashing)  # type: ignore[arg-type]  # it asks for write() alone
            except Exception as error:
                raise hashing.error or error from None  # torch makes a RuntimeError of what the disk said
            _sign(file, hashing.digest.hexdigest())
            file.flush()
            sync(file.fileno())
    except BaseException:
        beside.unlink(missing_ok=True)  # on a full disk that is room for the last words
        raise
    return beside


def _in_place(beside: Path, path: Path, *, keeps_older: bool = True) -> None:
    try:
        if keeps_older and path.exists():
            _also_as(before(path), path)
        beside.replace(path)
    except FileNotFoundError as error:  # it was there a moment ago
        raise DeletedError from error
    if os.name == "posix":  # the renames themselves must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            sync(folder)
        finally:
            os.close(folder)


def sync(descriptor: int) -> None:
    """What is written survives a power cut; a Mac's fsync() leaves it in the drive's memory, and F_FULLFSYNC does not."""
    if sys.platform == "darwin":
        import fcntl

        with suppress(OSError):  # a network's drive may not know it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the host, tensors and plain values only (`weights_only=True`): no code in it can run.

    Raises: RunnerError when the file is missing; TornError when it is not a checkpoint, was changed, or is unreadable.
    """
    if not path.is_file():
        raise RunnerError(
            Problem(
                f"checkpoint {path}",
                "there is no such file",
                "use use the path of a run's checkpoints/last.pt",
                code="missing-file",
            )
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise _torn(path, "the disk can't read it (EIO)") from error
    if not _is_whole(content):
        raise _torn(path, "it is torn or was altered: its checksum is not that of what is in it")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        problem = f"it can't be read as a checkpoint of tensors and plain values: {first_line(error)}"
        raise _torn(path, problem) from error
    if not isinstance(state, dict):
        raise _torn(path, f"it holds a {type(state).__name__} and no state of a run")
    return state


def before(path: Path) -> Path:
    """Where the checkpoint before the newest lies."""
    return path.with_name(f"{path.stem}-before{path.suffix}")


class CheckpointWriter:
    """Writes a run's checkpoints beside training, the two newest of each name; one overtaken while it waits is skipped.

    `notes`: what was wrong with a file when it was read, and what was taken instead.
    """

    def __init__(
        self,
        folder: Path,
        background: Background,
        *,
        writes: bool = True,
        device: torch.device | None = None,
        keeping: Keeping | None = None,
        check: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """writes: False for a process whose checkpoints another one writes; it keeps the newest in memory alone.

        device: where the tensors are (None: the CPU). keeping: which other checkpoints stay (None: none). check: raises for a state
        that is not to be gone on with, in the background, where it is on the host; no file is made of it then.
        """
        self._folder, self._background, self._writes, self._keeping = folder, background, writes, keeping
        self._check = check
        self._lock, self._turn = threading.Lock(), 0
        self._waiting: dict[str, tuple[int, Kept, Mapping[str, Any] | None]] = {}
        self._free: dict[str, dict[str, Any]] = {}  # a snapshot whose memory may be used again
        self._newest: dict[str, Kept] = {}
        self._device = device if device is not None and device.type != "cpu" else None
        self._pins: bool | None = None  # not known before the first
        self.notes: list[str] = []

    def newest(self, name: str) -> dict[str, Any] | None:
        """The newest of a name, on the host; waits until it has come over."""
        kept = self._newest.get(name)
        return kept.whole() if kept is not None else None

    def last(self) -> dict[str, Any] | None:
        """What an earlier process left to go on from, its best weights read too; None when there is nothing.

        Raises: TornError when there are files and none of them is whole: nothing is begun anew over them.
        """
        for name in ("best", "last"):
            state = self._newest_whole(self._folder / f"{name}.pt")
            if state is not None:
                self._newest[name] = Kept(state)
        return self.newest("last")

    def keep(self, name: str, state: dict[str, Any], *, entry: Mapping[str, Any] | None = None) -> None:
        """Takes a snapshot and returns; the file NAME.pt is written in the background.

        entry: of kept.json, for one that stays as step-N.pt, too, as long as `keeping` says; none of these is skipped: a
        newer one waits until it is written.
        Waits for the device where that has no streams, or where the host's memory has little room left: in pinned memory
        nothing else can lie; and where it overtakes another, which only one that is to be gone on with does.
        """
        with self._lock:
            waits, is_to_stay = name in self._waiting, self._waiting.get(name, (0, None, None))[2] is not None
        if is_to_stay:
            self._background.wait()
        elif waits and self._check is not None:
            try:
                self._check(state)
            except Exception as error:
                # the one that waits is good for all that is known, and is written; then this is told
                self._background.do_settled(partial(_raise, error))
                return
        with self._lock:
            _, overtaken, _ = self._waiting.pop(name, (0, None, None))
            free = overtaken.state if overtaken else self._free.pop(name, None)
        if not self._writes:
            older = self._newest.get(name)
            self._newest[name] = self._taken(state, older.state if older else None)
            return
        self._newest[name] = kept = self._taken(state, free)
        self._turn = turn = self._turn + 1
        with self._lock:
            self._waiting[name] = turn, kept, entry
        self._background.do_settled(lambda: self._write(name, turn))  # its rows are in the journal before it

    def _taken(self, state: dict[str, Any], into: dict[str, Any] | None) -> Kept:
        if self._pins is None:
            streamed = self._device is not None and bool(streams.side_stream(self._device))
            self._pins = streamed and num_bytes(state) * PINNED_AT_ONCE < memory_left()[0]
        taken = snapshot(state, into, pinned=self._pins)
        if not self._pins or self._device is None:
            return Kept(taken)
        copied = streams.event(self._device)
        copied.record(streams.current(self._device))
        return Kept(taken, copied)

    def _write(self, name: str, turn: int) -> None:
        """In the background. An overtaken one is left out, and not written as the newer one.

        The newer one's rows may still be on their way to the journal: what is ahead of it there, must be ahead of it here.
        """
        with self._lock:
            newest_turn, kept, entry = self._waiting.get(name, (0, Kept({}), None))
            if newest_turn != turn:
                return
            del self._waiting[name]
        state = kept.whole()
        if self._check is not None:
            self._check(state)
        path = self._folder / f"{name}.pt"
        if entry is None or self._keeping is None:
            save(state, path)
        else:
            note(self._folder, dict(entry))
            save_as_both(state, path, self._folder / file_of(entry["step"]))
            prune(self._folder, self._keeping)
        with self._lock:
            self._free[name] = state  # `newest` until the next is taken

    def _newest_whole(self, path: Path) -> dict[str, Any] | None:
        found = [file for file in (path, before(path)) if file.exists()]
        torn: list[TornError] = []
        for file in found:
            try:
                state = load(file)
            except TornError as error:
                torn.append(error)
                continue
            if torn:
                self.notes.append(
                    f"{path.name} is damaged; the checkpoint before it is used, of step {state.get('step')}"
                )
            elif file != path:
                self.notes.append(
                    f"{path.name} is missing; the checkpoint before it is used, of step {state.get('step')}"
                )
            return state
        if torn:
            raise torn[0]
        return None


class _Hashing(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        return len(data)


def _raise(error: Exception) -> NoReturn:
    raise error


def _also_as(other: Path, path: Path) -> None:
    linked = other.with_suffix(".linking")
    linked.unlink(missing_ok=True)
    try:
        os.link(path, linked)
    except OSError:  # a disk without hard links
        shutil.copyfile(path, linked)
    linked.replace(other)


def _sign(file: BinaryIO, digest: str) -> None:
    comment = MARK + digest.encode()
    file.seek(-len(NO_COMMENT), os.SEEK_END)
    file.write(len(comment).to_bytes(2, "little") + comment)


def _is_whole(content: bytes) -> bool:
    comment = content[-NUM_MARKED:]
    if not comment.startswith(MARK) or len(content) < NUM_MARKED + len(NO_COMMENT):
        return False
    body = memoryview(content)[: -NUM_MARKED - len(NO_COMMENT)]
    length = content[-NUM_MARKED - len(NO_COMMENT) : -NUM_MARKED]
    digest = hashlib.sha256(body)
    digest.update(NO_COMMENT)
    is_length = int.from_bytes(length, "little") == NUM_MARKED
    return is_length and digest.hexdigest().encode() == comment[len(MARK) :]


def _torn(path: Path, problem: str) -> TornError:
    write = f"{before(path).name} of the same folder in its place, or run it again in another folder"
    return TornError(Problem(f"checkpoint {path}", problem, write))
