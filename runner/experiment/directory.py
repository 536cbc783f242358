"""A run's directory: its files, as every command reads them, and its lock, which one process holds while the run lasts.

The files have the same names in every version.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from runner.config.defaults import in_words
from runner.config.identity import changes, chosen, may_change
from runner.errors import Problem, RunnerError
from runner.experiment.summary import Summary, length_key

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runner.tracking.ack import Ack

# the modules of tracking import numpy, which --help does not wait for
RERUN, ENVIRONMENT, DIFF = "rerun.yaml", "environment.txt", "git.diff"
CHECKPOINTS = "checkpoints"
BEST, LAST = f"{CHECKPOINTS}/best.pt", f"{CHECKPOINTS}/last.pt"
EXAMPLE = "journal/example.pt"  # a few rows of the model's inputs
LOG = "runner.log"
CONSOLE = "console.log"  # what a run prints that has no terminal
#: held by the process that was started, from its first file to its last; the journal has its writer's lock
LOCK = "journal/run.lock"
HYDRAS = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")
#: above 0 if a launcher restarted the processes after a failure: the same command then continues the run
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
MAX_SHOWN = 4


@dataclass(frozen=True)
class Run:
    """A run that has begun, by its directory."""

    folder: Path
    weights: str = BEST  # the file of those that a command uses

    @property
    def summary(self) -> Summary:
        """How it ended; an empty one without a summary."""
        return Summary.read(self.folder)

    @property
    def ack(self) -> Ack:
        """How much of it MLflow has."""
        from runner.tracking.ack import read_ack

        return read_ack(self.folder)

    @property
    def is_running(self) -> bool:
        """Whether a process writes to it."""
        from runner.tracking.journal import is_being_written

        return is_being_written(self.folder)

    @property
    def status(self) -> str:
        """As in the summary; running, or killed without a summary."""
        return "running" if self.is_running else self.summary.status or "killed"

    @property
    def is_resumable(self) -> bool:
        """Whether it has a checkpoint to resume from."""
        return any((self.folder / CHECKPOINTS).glob("last*.pt"))

    @property
    def has_begun(self) -> bool:
        from runner.tracking.journal_records import FILE, scan

        journal = self.folder / FILE
        return self.is_resumable or (journal.is_file() and any(record.kind == "start" for record in scan(journal)))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of a kind, in order."""
        from runner.tracking.journal_reader import read_events

        return [event for event in read_events(self.folder) if event["kind"] == kind]

    def points(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return the steps (n,) and values (n,) of each metric, in the order of writing."""
        from runner.tracking.journal_reader import read_series

        return {name: (steps, values) for name, (steps, _, values) in read_series(self.folder).items()}

    def has_other_data(self, fingerprint: str) -> bool:
        """Return whether it trained on data with another fingerprint, as far as it is known."""
        digests = [event["digest"] for event in self.events("dataset")]
        return bool(digests) and not fingerprint.startswith(digests[-1])

    def text(self, name: str) -> str | None:
        """Return one of its files; None if the file does not exist."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else None


class OverError(RunnerError):
    """The requested run is in the directory and has finished."""

    def __str__(self) -> str:
        (problem,) = self.problems
        return f"{problem.source}: {problem.message}; {problem.help}"


def _without_parents(path: Path) -> Path:
    """Return a path without `..`, as Hydra spells it; resolve() follows links, which Hydra does not."""
    return Path(os.path.abspath(path)) if ".." in path.parts else path  # noqa: PTH100


class RunDirectory:
    """A run's directory, held by this process; knows what was in it before.

    In one process a directory may be taken again by what a command calls: the lock is released with the last of them.
    """

    def __init__(self, path: Path, *, wait_seconds: float = 1.0) -> None:
        """Take it, and make it if necessary. A run that was killed holds it until its last data worker ends.

        Raises: RunnerError another process holds it, or it can't be made.
        """
        self.path = _without_parents(path).absolute()
        self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        source = f"run folder {self.path}"
        try:
            folders = {(self.path / name).parent for name in (*HYDRAS, LOG, LOCK)}
            self._before = {file for folder in folders if folder.is_dir() for file in folder.iterdir()}
            (self.path / LOCK).parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / LOCK, thread_local=False, is_singleton=True)
            self._lock.acquire(timeout=wait_seconds)
        except Timeout:
            raise RunnerError.of(source, "another run is writing there", "use another directory, or wait") from None
        except OSError as error:
            problem = f"the directory can't be created or written: {error.strerror}"
            raise RunnerError.of(source, problem, "use `hydra.run.dir=FOLDER` with one that you may write to") from None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def leave_nothing(self) -> None:
        """Remove what a run that did not start left, and the directories that were made for it.

        In a directory that was there before, other files may be the user's. Does nothing if a run has begun in it.
        """
        from runner.tracking import journal, journal_records  # numpy: not on the way to --help

        if (self.path / journal_records.FILE).exists():
            return
        if self.path in self._made:
            shutil.rmtree(self.path)
        uploaders = (self.path / LOCK).parent.glob("publish*")  # logs and locks
        for file in (*(self.path / name for name in (*HYDRAS, LOG, LOCK, journal.LOCK)), *uploaders):
            if file not in self._before:
                file.unlink(missing_ok=True)
        for name in (HYDRAS[0], LOCK):
            with suppress(OSError):  # something else is in it, or it is gone
                (self.path / name).parent.rmdir()
        for made in self._made:
            with suppress(OSError):
                made.rmdir()


@contextmanager
def begin(path: Path, cfg: DictConfig) -> Iterator[RunDirectory]:
    """Hold a directory for a run that begins.

    Raises: RunnerError for a directory with a run, OverError if it is this run and has finished.
    """
    refuse_used(path, cfg)
    with RunDirectory(path) as directory:
        refuse_used(path, cfg)  # the run that it waited for
        yield directory


def refuse_used(folder: Path, cfg: DictConfig) -> None:
    """Raise a RunnerError if a directory has a run: how it differs, or how to resume it. Writes nothing."""
    folder = _without_parents(folder)
    run = Run(folder)
    if not run.has_begun:
        return
    try:
        before = chosen(OmegaConf.load(folder / RERUN))  # type: ignore[arg-type]
    except Exception:  # it may be incomplete, or another program's
        before = {}
    now = chosen(cfg)
    changed = changes(before, now)
    source, resume = f"run folder {folder}", f"python -m runner resume {shlex.quote(str(folder))}"
    others = [key for key in changed if not may_change(key)]
    if others or not before:
        differences = [f"{key}={before.get(key, '-')} (now: {now.get(key, '-')})" for key in others[:MAX_SHOWN]]
        known = ", ".join(differences) if before else "its rerun.yaml can not be read"
        problem = f"another experiment is in it: {known}"
        fix = f"use another directory (the usual one has the time in its name), or run `{resume}`"
        raise RunnerError.of(source, problem, fix)
    more = in_words({key: now.get(key) for key in changed if key.startswith("train.")})
    if run.is_running:
        raise RunnerError.of(source, "this run is in it already, and is running", "use another directory, or wait")
    if run.summary.is_over() and not more:
        fix = f"run `{resume} {length_key(cfg)}=...` for more of it, or use another directory"
        raise OverError(Problem(source, "the run has finished", fix))
    if any(os.environ.get(name, "0") != "0" for name in RESTARTS):
        return
    fix = f"run `{f'{resume} {more}'.rstrip()}`, or use another directory"
    raise RunnerError.of(source, "this run is in it already, and can be resumed", fix)


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a directory on the disk of another one, where no command looks for runs; remove it afterwards."""
    folder, here = folder.absolute(), Path.cwd()
    near = here if folder.is_relative_to(here) else next(path for path in folder.parents if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".runner-check-", dir=near, ignore_cleanup_errors=True) as name:
        yield Path(name)
