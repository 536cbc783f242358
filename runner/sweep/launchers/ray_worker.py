"""Run a job in an actor on a machine of a Ray cluster, and return its exit code, and its files if none are shared.

ray.py requests the actor and sends it the job; the actor holds the job's process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runner.sweep.launchers.process_pool import ProcessPool
from runner.sweep.launchers.worker import Request

LOOK_SECONDS = 0.1
Files = dict[str, tuple[bytes, float]]  # content and time of change, by path in a job's directory


@dataclass(frozen=True)
class Home:
    """The user's machine. A machine that finds `secret` in the file `mark` shares the user's files."""

    folder: str  # the sweep's current directory
    mark: str  # a file in the sweep's directory
    secret: str


@dataclass(frozen=True)
class Arrival:
    """The machine on which Ray has placed a job."""

    node_id: str
    folder: str | None  # the job's directory there; None if it is the one in the user's files


class Site:
    """The Ray actor of one job: a separate process that holds the job's share of the machine's resources.

    The job is a child process, so that it can receive a signal to save its state, and so that a crash has an exit code. When
    the actor ends, for any reason, its job gets a SIGTERM and its grace period (runner.sweep.launchers.worker). All methods run
    in one thread.
    """

    def __init__(self, home: Home, environment: dict[str, str]) -> None:
        """environment: Variables added to the environment that Ray sets."""
        self._folder = None if _shares(home) else tempfile.mkdtemp(prefix="runner-job-")
        if self._folder is None and Path(home.folder).is_dir():
            os.chdir(home.folder)  # relative paths in the configuration are relative to the user's directory
        self._process_pool = ProcessPool(environment)

    async def arrived(self) -> Arrival:
        import ray

        return Arrival(ray.get_runtime_context().get_node_id(), self._folder)

    async def run(self, request: Request, files: Files) -> tuple[int | None, Files]:
        """Return the exit code, or minus the signal; and the job's files, if it did not run in the user's.

        files: What is already in the job's directory.
        """
        if self._folder is not None:
            write_files(files, Path(self._folder))
        self._number = request.number
        self._process_pool.start(request)
        try:
            while not (ended := self._process_pool.ended()):
                await asyncio.sleep(LOOK_SECONDS)
            return ended[0].code, {} if self._folder is None else files_in(Path(self._folder))
        finally:
            self._process_pool.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    async def stop(self, what: int) -> None:
        self._process_pool.signal(self._number, signal.Signals(what), whole_group=what == signal.SIGKILL)


def _shares(home: Home) -> bool:
    try:
        return Path(home.mark).read_text() == home.secret
    except OSError:
        return False


def files_in(folder: Path) -> Files:
    """Return all files below a directory, without links; {} if it does not exist."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime) for path in paths}


def write_files(files: Files, folder: Path) -> None:
    """Write the files to the directory, each atomically; other files stay. Raises: ValueError for one outside of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (content, changed_at) in files.items():
        path = folder / name
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} would be outside of the job's directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        incoming = path.with_name(f"{path.name}.arriving")
        incoming.write_bytes(content)
        os.utime(incoming, (changed_at, changed_at))  # the end of a killed run is its journal's last change
        incoming.replace(path)
