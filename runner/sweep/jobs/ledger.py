"""Writes what happens to a sweep's jobs into ledger.jsonl, line by line, and reads the sweep's state from it, also after a kill.

The sweep's process writes and holds the lock; the report, sweep.resume and commands read. Job is what is known of a job.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from runner.errors import RunnerError, nearest, without_password
from runner.experiment.provenance import TRIES
from runner.tracking.journal import is_held

FILE = "ledger.jsonl"  # in a sweep's folder
LOCK = "ledger.lock"
DEFAULTS = "(defaults)"  # shown as the name of a job without overrides
#: how a job may end for good; `planned`, `running` and `interrupted` (the sweep was stopped) wait for their turn
ENDS = ("finished", "failed", "killed", "pruned", "skipped")


@dataclass
class Job:
    """One job of a sweep and what is known of it."""

    number: int
    overrides: tuple[str, ...]  # as the command line takes them
    name: str  # readable: what sets it apart from the other jobs, e.g. "device=cpu seed=2"
    state: str = "planned"  # planned, running, interrupted, or one of ENDS
    device: str | None = None  # None: not placed yet
    error: str | None = None  # its first line; why it was skipped
    folder_name: str = ""  # below the sweep's folder; a job that is tried again gets another one
    trial: dict[str, Any] | None = None  # of a search: what Optuna asked for, by key

    @property
    def is_done(self) -> bool:
        return self.state in ENDS


@dataclass
class Sweep:
    """A sweep's folder as its ledger tells it."""

    folder: Path
    uid: str
    began_ms: int
    overrides: tuple[str, ...]  # the words of the command line
    #: of a search: [{"metric": "val/loss", "direction": "minimize"}, ...]; of a grid: empty
    objectives: tuple[dict[str, str], ...] = ()
    max_seeds: int | None = None  # the most that sweep.until was to add up to; None: it was to add none
    jobs: dict[int, Job] = field(default_factory=dict)

    def folder_of(self, job: Job) -> Path:
        return self.folder / job.folder_name


class Ledger:
    """The one writer of a sweep's ledger; what a call writes is on the disk when it returns (0.2 ms on an SSD)."""

    def __init__(self, folder: Path) -> None:
        """Opens it, and makes it if need be. Raises: RunnerError when another process is running this sweep."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            problem = "another process is running this sweep"
            raise RunnerError.of(
                f"sweep {folder}", problem, "wait until it has ended, or stop it with Ctrl-C"
            ) from None
        self.path = folder / FILE
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        _cut_torn_line(self._fd)

    def begin(self, sweep: Sweep) -> None:
        fields = {"uid": sweep.uid, "began_ms": sweep.began_ms}
        self._append({"kind": "sweep", **fields, "overrides": kept(sweep.overrides), "objectives": sweep.objectives})

    def plan(self, *jobs: Job) -> None:
        """New jobs, or old ones that get another folder."""
        self._append(*(_planned(job) for job in jobs))

    def note(self, *jobs: Job) -> None:
        """The jobs' states, devices and errors as they are now."""
        self._append(*(_noted(job) for job in jobs))

    def note_max_seeds(self, number: int) -> None:
        self._append({"kind": "until", "max_seeds": number})

    def close(self) -> None:
        os.close(self._fd)
        self._lock.release()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, *lines: dict[str, Any]) -> None:
        now = int(time.time() * 1000)
        text = "".join(json.dumps({**line, "time_ms": now}) + "\n" for line in lines)
        begin, rest = os.lseek(self._fd, 0, os.SEEK_END), text.encode()
        try:
            while rest:  # a disk that gets full takes a part of them
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:  # Ctrl-C, too: a line after half of one could not be read any more
            os.ftruncate(self._fd, begin)
            raise
        os.fsync(self._fd)


def kept(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides as they stand in a ledger, without passwords: who goes on with a sweep gives its words again."""
    return tuple(map(without_password, overrides))


def _planned(job: Job) -> dict[str, Any]:
    what = {"overrides": kept(job.overrides), "name": job.name, "folder": job.folder_name, "trial": job.trial}
    return {"kind": "job", "job": job.number, **what}


def _noted(job: Job) -> dict[str, Any]:
    return {"kind": "state", "job": job.number, "state": job.state, "device": job.device, "error": job.error}


def _instead(folder: Path) -> str:
    there = [*folder.parent.glob(f"*/{FILE}"), *Path("multirun").glob(f"**/{FILE}")]
    hits = nearest(str(folder), {str(file.parent) for file in there} - {str(folder)})
    return " or ".join(shlex.quote(hit) for hit in hits) or "multirun/DATE/TIME"


def is_running(folder: Path) -> bool:
    """Whether some process is running the sweep of this folder."""
    return is_held(folder / LOCK)


def read(folder: Path) -> Sweep:
    """The sweep as its ledger has it. Raises: RunnerError when the folder holds none."""
    lines = _lines(folder / FILE)
    if not lines or lines[0]["kind"] != "sweep":
        problem = f"`{folder}` has no sweep" if folder.is_dir() else f"there is no directory `{folder}`"
        raise RunnerError.of(f"sweep {folder}", problem, f"name a sweep's directory: {_instead(folder)}")
    head = lines[0]
    sweep = Sweep(folder, head["uid"], head["began_ms"], tuple(head["overrides"]), tuple(head["objectives"]))
    for line in lines[1:]:
        if line["kind"] == "job":
            before = sweep.jobs.get(line["job"])
            sweep.jobs[line["job"]] = job = Job(
                line["job"], tuple(line["overrides"]), line["name"], folder_name=line["folder"], trial=line["trial"]
            )
            if before is not None and before.folder_name == job.folder_name:  # other words for what it is
                job.state, job.device, job.error = before.state, before.device, before.error
        elif line["kind"] == "state":
            job = sweep.jobs[line["job"]]
            job.state, job.device, job.error = line["state"], line["device"], line["error"]
        elif line["kind"] == "until":
            sweep.max_seeds = line["max_seeds"]
    return sweep


def find_last(root: Path) -> Path | None:
    """The folder below `root` whose sweep did something last, but for those of tries; None when there is none."""
    found = [path for path in root.glob(f"**/{FILE}") if not path.is_relative_to(root / TRIES.name)]
    found.sort(key=lambda path: path.stat().st_mtime_ns)
    return found[-1].parent if found else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines; one that a kill tore off counts as not written."""
    text = path.read_text() if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def _cut_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_SET)
    text = os.read(fd, size) if size else b""
    os.ftruncate(fd, text.rfind(b"\n") + 1)
