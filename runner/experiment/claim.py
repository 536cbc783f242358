"""Takes a run's directory for this process by a lock, or says why no run can begin in it."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from runner.config.defaults import in_words
from runner.config.identity import changes, chosen, may_change
from runner.errors import Problem, RunnerError
from runner.experiment.directory import RERUN, Run
from runner.experiment.summary import length_key

#: held by the process that was started, from its first file to its last; the journal has its writer's lock
LOCK = "journal/run.lock"
#: above 0 if a launcher restarted the processes after a failure: the same command then continues the run
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
MOST_SHOWN = 4
LOG = "runner.log"
CONSOLE = "console.log"  # what a run prints that has no terminal
HYDRAS = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")


class OverError(RunnerError):
    """The requested run is in the directory and has finished."""


def spelled(folder: Path) -> Path:
    """Return a run's directory without `..` in its path, as Hydra spells it."""
    if ".." not in folder.parts:
        return folder
    return Path(os.path.abspath(folder))  # noqa: PTH100  # resolve() follows links, which Hydra does not


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a directory on the disk of another one, where no command looks for runs; remove it afterwards."""
    folder, here = folder.absolute(), Path.cwd()
    near = here if folder.is_relative_to(here) else next(path for path in folder.parents if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".runner-check-", dir=near, ignore_cleanup_errors=True) as name:
        yield Path(name)


class RunDirectory:
    """A run's directory, held by this process; knows what was in it before.

    In one process a directory may be taken again by what a command calls: the lock is released with the last of them.
    """

    def __init__(self, path: Path, *, wait_seconds: float = 1.0) -> None:
        """Take it, and make it if necessary. A run that was killed holds it until its last data worker ends.

        Raises: RunnerError another process holds it, or it can't be made.
        """
        self.path = spelled(path).absolute()
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

    @classmethod
    def begin(cls, path: Path, cfg: DictConfig, *, from_rerun: bool = False) -> RunDirectory:
        """Take a directory for a run that begins.

        from_rerun: Also refuse a run that has finished (with `-cd DIRECTORY -cn rerun`).
        Raises: RunnerError for a directory with a run, OverError if it is this run and has finished.
        """
        refuse_used(path, cfg, from_rerun=from_rerun)
        directory = cls(path)
        try:
            refuse_used(path, cfg, from_rerun=from_rerun)  # the run that it waited for
        except RunnerError:
            directory.release()
            raise
        return directory

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others take it."""
        self._lock.release()

    def leave_nothing(self) -> None:
        """Remove what a run that did not start left, and the directories that were made for it.

        In a directory that was there before, other files may be the user's. Does nothing if a run has begun in it.
        """
        from runner.tracking import journal, journal_records, publisher, sync  # numpy: not on the way to --help

        if (self.path / journal_records.FILE).exists():
            return
        if self.path in self._made:
            shutil.rmtree(self.path)
        for name in (*HYDRAS, LOG, LOCK, journal.LOCK, publisher.LOG, sync.LOCK):
            if (file := self.path / name) not in self._before:
                file.unlink(missing_ok=True)
        for name in (HYDRAS[0], LOCK):
            with suppress(OSError):  # something else is in it, or it is gone
                (self.path / name).parent.rmdir()
        for made in self._made:
            with suppress(OSError):
                made.rmdir()


def refuse_used(folder: Path, cfg: DictConfig, *, from_rerun: bool = False) -> None:
    """Raise a RunnerError if a directory has a run: how it differs, or how to resume it. Writes nothing."""
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
        differences = [f"{key}={before.get(key, '-')} (now: {now.get(key, '-')})" for key in others[:MOST_SHOWN]]
        known = ", ".join(differences) if before else "its rerun.yaml can not be read"
        problem = f"another experiment is in it: {known}"
        fix = f"use another directory (the usual one has the time in its name), or run `{resume}`"
        raise RunnerError.of(source, problem, fix)
    more = in_words({key: now.get(key) for key in changed if key.startswith("train.")})
    if run.is_running:
        raise RunnerError.of(source, "this run is in it already, and is running", "use another directory, or wait")
    if run.summary.is_over() and not more:
        if from_rerun:
            raise RunnerError.of(source, "this run is in it already, and has finished", "use another directory")
        fix = f"run `{resume} {length_key(cfg)}=...` for more of it, or use another directory"
        raise OverError(Problem(source, "the run has finished", fix))
    if any(os.environ.get(name, "0") != "0" for name in RESTARTS):
        return
    fix = f"run `{f'{resume} {more}'.rstrip()}`, or use another directory"
    raise RunnerError.of(source, "this run is in it already, and can be resumed", fix)


def over_line(error: OverError) -> str:
    """Return the line for a run that is started again after its end."""
    (problem,) = error.problems
    return f"{problem.source}: {problem.message}; {problem.help}"
