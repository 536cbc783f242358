"""Writes a run's checkpoints to files, complete or not at all, in the background thread, and reads them.

state.py knows their contents. CheckpointWriter keeps the newest of each name in memory. `checkpoints/step-N.pt` are the ones
that train.keep_checkpoints keeps; kept.json lists their metrics.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from runner.config.run_files import write_whole
from runner.device import streams
from runner.device.host_memory import memory_left
from runner.device.placement import num_bytes
from runner.errors import DeletedError, Problem, RunnerError, first_line
from runner.training.background import Background

#: the comment of torch's zip archive: the SHA-256 of everything before it, as torch.load() checks no sums (2.13)
MARK = b"runner sha256 "
NUM_MARKED = len(MARK) + 64
NO_COMMENT = b"\0\0"
#: snapshots in pinned memory: two names, one taken while another is written, each rounded up to a power of two
PINNED_AT_ONCE = 8
KEPT = "kept.json"


class TornError(RunnerError):
    """A checkpoint that differs from what was written."""


def snapshot(state: Any, into: Any = None, *, pinned: bool = False) -> Any:
    """Copy the state's tensors to the host, so that training may continue while they are written.

    Args:
        into: An older snapshot, whose memory is used again where it fits. New memory costs five times the copy.
        pinned: Copy without waiting for the device; the values are complete after an event that is recorded afterwards.
    """
    if isinstance(state, Tensor):
        fits = isinstance(into, Tensor) and into.shape == state.shape and into.dtype == state.dtype
        if pinned and state.device.type != "cpu":
            host = into if fits and into.is_pinned() else torch.empty_like(state, device="cpu", pin_memory=True)
            return host.copy_(state.detach(), non_blocking=True)
        return into.copy_(state.detach()) if fits else state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        older = into if isinstance(into, dict) else {}
        return {key: snapshot(value, older.get(key), pinned=pinned) for key, value in state.items()}
    if isinstance(state, list | tuple):
        fits = isinstance(into, list | tuple) and len(into) == len(state)
        return type(state)(snapshot(value, into[at] if fits else None, pinned=pinned) for at, value in enumerate(state))
    return state


@dataclass(frozen=True)
class Snapshot:
    """A state on the host, and the event after its copies."""

    state: dict[str, Any]
    copied: torch.Event | None = None

    def wait(self) -> dict[str, Any]:
        """Return the state as soon as it is complete."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.state


def save(state: dict[str, Any], path: Path, *also: Path) -> None:
    """Write a new file and rename it to `path`: readers and crashes find the old file or the new one.

    The previous file is kept as NAME-before.pt. Hashing costs about 1 s for 1 GB.

    Args:
        also: Other paths for the same file, in the same directory, which exist before `path`.

    Raises:
        OSError: DeletedError if the directory is deleted in between.
    """
    new = _written(state, path)
    try:
        for other in also:
            _link(other, new)
        if path.exists():
            _link(before(path), path)
        new.replace(path)
    except FileNotFoundError as error:
        raise DeletedError from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        sync(folder)  # the renames must survive a power cut, too
    finally:
        os.close(folder)


def _written(state: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".writing")
    try:
        with new.open("w+b") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # which torch replaces (2.13)
                    raise error.__context__ from None
                raise
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(-len(NO_COMMENT), os.SEEK_END)
            file.write(_comment(digest))
            file.flush()
            sync(file.fileno())
    except BaseException:
        new.unlink(missing_ok=True)  # on a full disk this makes room for the journal's last lines
        raise
    return new


def sync(descriptor: int) -> None:
    """Make written data survive a power cut. On a Mac fsync() leaves it in the drive's memory, F_FULLFSYNC doesn't."""
    if sys.platform == "darwin":
        import fcntl

        with suppress(OSError):  # network drives may not have it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the host, tensors and plain values only (`weights_only=True`): no code in it can run.

    Raises:
        RunnerError: If the file doesn't exist; TornError if it is not a checkpoint, was changed, or can't be read.
    """
    if not path.is_file():
        fix = "use the path of a run's `checkpoints/last.pt`"
        raise RunnerError.of(f"checkpoint {path}", "there is no such file", fix, code="missing-file")
    try:
        content = path.read_bytes()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise _torn(path, "the disk can't read it (EIO)") from error
    if not _is_complete(content):
        raise _torn(path, "it is torn or was altered: its checksum is not that of its content")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        problem = f"it can't be read as a checkpoint of tensors and plain values: {first_line(error)}"
        raise _torn(path, problem) from error
    if not isinstance(state, dict):
        raise _torn(path, f"it holds a {type(state).__name__} and no state of a run")
    return state


def before(path: Path) -> Path:
    """The path of the previous checkpoint."""
    return path.with_name(f"{path.stem}-before{path.suffix}")


@dataclass(frozen=True)
class Keeping:
    """Which evaluated steps keep their checkpoint: all, the last `most`, or the best `most` by a metric."""

    most: int | None  # None: all
    metric: str | None = None  # None: the last ones
    mode: str = "min"

    @classmethod
    def of(cls, rule: str, *, metric: str, mode: str) -> Keeping:
        """rule: train.keep_checkpoints."""
        kind, _, most = rule.partition(":")
        return cls(int(most) if most else None, metric if kind == "best" else None, mode)


def read_kept(folder: Path) -> list[dict[str, Any]]:
    """The entries of kept.json by step; [] without such a file, or if it is damaged."""
    try:
        entries = json.loads((folder / KEPT).read_text())
        return [{**entry, "file": _file_of(int(entry["step"]))} for entry in entries]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def prune(folder: Path, keeping: Keeping) -> None:
    """Delete the checkpoints that `keeping` doesn't keep, also files that kept.json doesn't list."""
    listed = {entry["step"]: entry for entry in read_kept(folder)}
    files = {int(path.stem[5:]) for path in folder.glob("step-*.pt") if path.stem[5:].isdecimal()}
    unlisted = [{"file": _file_of(step), "step": step, "metrics": {}} for step in files - listed.keys()]
    entries = sorted([*listed.values(), *unlisted], key=lambda entry: _worth(entry, keeping), reverse=True)
    kept = entries[: keeping.most]
    for entry in entries[len(kept) :]:
        (folder / entry["file"]).unlink(missing_ok=True)
    if {entry["step"] for entry in kept} != listed.keys():
        _write_kept(folder, kept)


def _file_of(step: int) -> str:
    return f"step-{step}.pt"


def _worth(entry: dict[str, Any], keeping: Keeping) -> tuple[float, int]:
    if keeping.metric is None:
        return 0.0, entry["step"]
    value = float(entry["metrics"].get(keeping.metric, math.nan))
    if math.isnan(value):
        return -math.inf, entry["step"]
    return (-value if keeping.mode == "min" else value), entry["step"]


def _write_kept(folder: Path, entries: list[dict[str, Any]]) -> None:
    write_whole(folder / KEPT, json.dumps(sorted(entries, key=lambda entry: entry["step"]), indent=1) + "\n")


class CheckpointWriter:
    """Writes a run's checkpoints in the background, the two newest of each name. Skips one if a newer one already waits.

    `notes` has the problems of files that were read, and which files were used instead.

    Args:
        writes: False in a process whose checkpoints another one writes; it only keeps the newest in memory.
        device: Of the tensors; None: the CPU.
        keeping: Which other checkpoints stay; None: no others.
        check: Raises for a state that must not be resumed, in the background; it is not written then.
    """

    def __init__(
        self,
        folder: Path,
        background: Background,
        *,
        writes: bool = True,
        device: torch.device | None = None,
        keeping: Keeping | None = None,
        check: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        self._folder, self._background, self._writes, self.keeping = folder, background, writes, keeping
        self._check = check
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Snapshot, Mapping[str, Any] | None]] = {}
        self._free: dict[str, dict[str, Any]] = {}  # a snapshot whose memory may be used again
        self._newest: dict[str, Snapshot] = {}
        self._device = device if device is not None and device.type != "cpu" else None
        self._pins: bool | None = None  # decided at the first snapshot
        self.notes: list[str] = []

    def newest(self, name: str) -> dict[str, Any] | None:
        """The newest of a name, on the host; waits for its copies."""
        newest = self._newest.get(name)
        return newest.wait() if newest is not None else None

    def last(self) -> dict[str, Any] | None:
        """Read the checkpoint and the best weights of an earlier process; None without a checkpoint.

        Raises:
            TornError: If all its files are damaged, so that no run overwrites them.
        """
        for name in ("best", "last"):
            state = self._read(self._folder / f"{name}.pt")
            if state is not None:
                self._newest[name] = Snapshot(state)
        return self.newest("last")

    def keep(self, name: str, state: dict[str, Any], *, entry: Mapping[str, Any] | None = None) -> None:
        """Take a snapshot and return; the background thread writes the file NAME.pt.

        Waits for the device if it has no streams, if the host's memory is too small for pinned snapshots, and if an
        unwritten checkpoint is replaced, as the new one is checked before.

        Args:
            entry: For kept.json. The checkpoint also stays as step-N.pt, as `keeping` says, and is never skipped.
        """
        with self._lock:
            waiting = self._waiting.get(name)
        if waiting is not None and waiting[1] is not None:
            self._background.wait()
        elif waiting is not None:
            try:
                self._check(state)
            except Exception as error:  # raised after the waiting checkpoint is written
                self._background.do_settled(partial(_raise, error))
                return
        with self._lock:
            skipped = self._waiting.pop(name, None)
            free = skipped[0].state if skipped else self._free.pop(name, None)
        if not self._writes:
            older = self._newest.get(name)
            free = older.state if older else None
        self._newest[name] = taken = self._take(state, free)
        if self._writes:
            with self._lock:
                self._waiting[name] = taken, entry
            self._background.do_settled(partial(self._write, name, taken))  # after its rows are in the journal

    def _take(self, state: dict[str, Any], into: dict[str, Any] | None) -> Snapshot:
        if self._pins is None:
            streamed = self._device is not None and bool(streams.side_stream(self._device))
            self._pins = streamed and num_bytes(state) * PINNED_AT_ONCE < memory_left()[0]
        taken = snapshot(state, into, pinned=self._pins)
        if not self._pins or self._device is None:
            return Snapshot(taken)
        copied = streams.event(self._device)
        copied.record(streams.current(self._device))
        return Snapshot(taken, copied)

    def _write(self, name: str, taken: Snapshot) -> None:
        """Write the waiting checkpoint, unless a newer one replaced it, whose rows may not be in the journal yet."""
        with self._lock:
            waiting, entry = self._waiting.get(name, (None, None))
            if waiting is not taken:
                return
            del self._waiting[name]
        state = taken.wait()
        self._check(state)
        path = self._folder / f"{name}.pt"
        if entry is None or self.keeping is None:
            save(state, path)
        else:
            # listed before it exists: a resumed run takes one again that a kill prevented
            others = [other for other in read_kept(self._folder) if other["step"] != entry["step"]]
            _write_kept(self._folder, [*others, {"file": _file_of(entry["step"]), **entry}])
            save(state, path, self._folder / _file_of(entry["step"]))
            prune(self._folder, self.keeping)
        with self._lock:
            self._free[name] = state  # also the newest, until the next is taken

    def _read(self, path: Path) -> dict[str, Any] | None:
        torn: list[TornError] = []
        for file in (path, before(path)):
            if not file.exists():
                continue
            try:
                state = load(file)
            except TornError as error:
                torn.append(error)
                continue
            if torn or file != path:
                problem = "damaged" if torn else "missing"
                self.notes.append(
                    f"{path.name} is {problem}; the checkpoint before it is used, of step {state.get('step')}"
                )
            return state
        if torn:
            raise torn[0]
        return None


def _raise(error: Exception) -> NoReturn:
    raise error


def _link(other: Path, path: Path) -> None:
    linked = other.with_suffix(".linking")
    linked.unlink(missing_ok=True)
    try:
        os.link(path, linked)
    except OSError:  # a disk without hard links
        shutil.copyfile(path, linked)
    linked.replace(other)


def _comment(digest: str) -> bytes:
    return NUM_MARKED.to_bytes(2, "little") + MARK + digest.encode()


def _is_complete(content: bytes) -> bool:
    length = max(0, len(content) - NUM_MARKED - len(NO_COMMENT))
    digest = hashlib.sha256(memoryview(content)[:length])
    digest.update(NO_COMMENT)
    return content[length:] == _comment(digest.hexdigest())


def _torn(path: Path, problem: str) -> TornError:
    fix = f"use `{before(path).name}` of the same directory, or run again in another directory"
    return TornError(Problem(f"checkpoint {path}", problem, fix))
