"""ledger.jsonl: the state of a sweep's jobs, appended line by line, so that it can be read after a kill.

The sweep's process writes it and holds the lock; the report, sweep.resume and commands read it.
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

FILE = "ledger.jsonl"  # in a sweep directory
LOCK = "ledger.lock"
DEFAULTS = "(defaults)"  # the name of a job without overrides
ALONE = "alone"  # status of a job that can't be trained together with its group
#: final states; `planned`, `running` and `interrupted` (by a stop of the sweep) are run later
ENDS = ("finished", "failed", "killed", "pruned", "skipped")


@dataclass
class Job:
    """One job of a sweep."""

    number: int
    overrides: tuple[str, ...]  # as on the command line
    name: str  # the overrides in which it differs from the other jobs, e.g., "device=cpu seed=2"
    state: str = "planned"  # planned, running, interrupted, or one of ENDS
    device: str | None = None  # None: not placed yet
    error: str | None = None  # its first line; why it was skipped
    folder_name: str = ""  # in the sweep directory; a repeated job gets another one
    trial: dict[str, Any] | None = None  # of a search: Optuna's values by key

    @property
    def is_done(self) -> bool:
        return self.state in ENDS


@dataclass
class Sweep:
    """A sweep, as read from its ledger."""

    folder: Path
    uid: str
    began_ms: int
    overrides: tuple[str, ...]  # of the command line
    #: of a search: [{"metric": "val/loss", "direction": "minimize"}, ...]; of a grid: empty
    objectives: tuple[dict[str, str], ...] = ()
    max_seeds: int | None = None  # for sweep.until; None: it adds no seeds
    jobs: dict[int, Job] = field(default_factory=dict)

    def folder_of(self, job: Job) -> Path:
        return self.folder / job.folder_name


class Ledger:
    """The only writer of a sweep's ledger; a line is on disk when a call returns (0.2 ms on an SSD)."""

    def __init__(self, folder: Path) -> None:
        """Open or create it. Raises: RunnerError if another process is running this sweep."""
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
        head = {"uid": sweep.uid, "began_ms": sweep.began_ms, "overrides": kept(sweep.overrides)}
        self._append({"kind": "sweep", **head, "objectives": sweep.objectives})

    def plan(self, *jobs: Job) -> None:
        """Write new jobs, or jobs with a new directory."""
        self._append(*map(_planned, jobs))

    def note(self, *jobs: Job) -> None:
        """Write the jobs' current states, devices and errors."""
        self._append(*map(_noted, jobs))

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
            while rest:  # a full disk writes only a part
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:  # also Ctrl-C: a line after an incomplete one would be unreadable
            os.ftruncate(self._fd, begin)
            raise
        os.fsync(self._fd)


def kept(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides without passwords: a resumed sweep gets its arguments again."""
    return tuple(map(without_password, overrides))


def _planned(job: Job) -> dict[str, Any]:
    values = {"overrides": kept(job.overrides), "name": job.name, "folder": job.folder_name, "trial": job.trial}
    return {"kind": "job", "job": job.number, **values}


def _noted(job: Job) -> dict[str, Any]:
    return {"kind": "state", "job": job.number, "state": job.state, "device": job.device, "error": job.error}


def is_running(folder: Path) -> bool:
    """Return whether a process is running the sweep in this directory."""
    return is_held(folder / LOCK)


def read(folder: Path) -> Sweep:
    """Read a sweep from its ledger. Raises: RunnerError if the directory has none."""
    path = folder / FILE
    text = path.read_text() if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]  # without a line that a kill cut off
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines or lines[0]["kind"] != "sweep":
        problem = f"`{folder}` has no sweep" if folder.is_dir() else f"there is no directory `{folder}`"
        others = {str(file.parent) for file in (*folder.parent.glob(f"*/{FILE}"), *Path("multirun").glob(f"**/{FILE}"))}
        names = " or ".join(map(shlex.quote, nearest(str(folder), others - {str(folder)}))) or "multirun/DATE/TIME"
        raise RunnerError.of(f"sweep {folder}", problem, f"name a sweep's directory: {names}")
    head = lines[0]
    sweep = Sweep(folder, head["uid"], head["began_ms"], tuple(head["overrides"]), tuple(head["objectives"]))
    for line in lines[1:]:
        if line["kind"] == "job":
            before = sweep.jobs.get(line["job"])
            sweep.jobs[line["job"]] = job = Job(
                line["job"], tuple(line["overrides"]), line["name"], folder_name=line["folder"], trial=line["trial"]
            )
            if before is not None and before.folder_name == job.folder_name:  # a change of its overrides only
                job.state, job.device, job.error = before.state, before.device, before.error
        elif line["kind"] == "state":
            job = sweep.jobs[line["job"]]
            job.state, job.device, job.error = line["state"], line["device"], line["error"]
        elif line["kind"] == "until":
            sweep.max_seeds = line["max_seeds"]
    return sweep


def find_last(root: Path) -> Path | None:
    """Return the directory of the last active sweep below `root`, except those of `try`, or None."""
    paths = [path for path in root.glob(f"**/{FILE}") if not path.is_relative_to(root / TRIES.name)]
    return max(paths, key=lambda path: path.stat().st_mtime_ns).parent if paths else None


def _cut_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_SET)
    text = os.read(fd, size) if size else b""
    os.ftruncate(fd, text.rfind(b"\n") + 1)
