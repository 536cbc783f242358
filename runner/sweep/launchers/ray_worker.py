"""Run a job in an actor on a machine of a Ray cluster, and return its exit code, and its directory if none is shared.

ray.py requests the actor and sends it the job and its packed directory; the actor holds the job's process.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.sweep.launchers.process_pool import ProcessPool
from runner.sweep.launchers.worker import Request

LOOK_SECONDS = 0.1


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
    job_files: str | None  # the job's directory there; None if it is the one in the user's files


class Site:
    """The Ray actor of one job: a separate process that holds the job's share of the machine's resources.

    The job is a child process, so that it can receive a signal to save its state, and so that a crash has an exit code. When
    the actor ends, for any reason, its job gets a SIGTERM and its grace period (runner.sweep.launchers.worker). All methods run
    in one thread.
    """

    def __init__(self, home: Home, environment: dict[str, str]) -> None:
        """environment: Variables added to the environment that Ray sets."""
        self._is_home = _shares(home)
        if self._is_home and Path(home.folder).is_dir():
            os.chdir(home.folder)  # relative paths in the configuration are relative to the user's directory
        self._job_files = None if self._is_home else tempfile.mkdtemp(prefix="runner-job-")
        self._process_pool = ProcessPool(environment)

    async def arrived(self) -> Arrival:
        import ray

        return Arrival(ray.get_runtime_context().get_node_id(), self._job_files)

    async def run(self, request: Request, job_files: bytes) -> tuple[int | None, bytes]:
        """Return the exit code, or minus the signal; and the packed job directory, if the job did not run in the user's files.

        job_files: The packed files that are already in the job's directory.
        """
        if self._job_files is not None:
            unpack(job_files, Path(self._job_files))
        self._number = request.number
        self._process_pool.start(request)
        try:
            while not (ended := self._process_pool.ended()):
                await asyncio.sleep(LOOK_SECONDS)
            return ended[0].code, b"" if self._job_files is None else pack(Path(self._job_files))
        finally:
            self._process_pool.close()
            if self._job_files is not None:
                shutil.rmtree(self._job_files, ignore_errors=True)

    async def stop(self, what: int) -> None:
        self._process_pool.signal(self._number, signal.Signals(what), whole_group=what == signal.SIGKILL)


def _shares(home: Home) -> bool:
    try:
        return Path(home.mark).read_text() == home.secret
    except OSError:
        return False


def variables_of(config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the job needs: those in its YAML, the runner's and MLflow's."""
    named = set(re.findall(r"\$\{oc\.env:\s*([A-Za-z_]\w*)", config))
    return {
        name: value for name, value in environment.items() if name in named or name.startswith(("RUNNER_", "MLFLOW_"))
    }


def pack(folder: Path) -> bytes:
    """Return all files below the directory, compressed; b"" if it does not exist. Uses twice its size in memory."""
    if not folder.is_dir():
        return b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def unpack(job_files: bytes, folder: Path) -> None:
    """Write the files to the directory, each atomically; other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if not job_files:
        return
    with tarfile.open(fileobj=io.BytesIO(job_files), mode="r:gz") as archive:
        for member in archive:
            path = folder / member.name
            if not path.parent.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{member.name} would be outside of the job's directory")
            content = archive.extractfile(member) if member.isfile() else None  # extract() has a filter from 3.11.4 on
            if content is None:
                raise ValueError(f"{member.name} is not a file, and a job's directory sends only files")
            path.parent.mkdir(parents=True, exist_ok=True)
            incoming = path.with_name(f"{path.name}.arriving")
            with incoming.open("wb") as file:
                shutil.copyfileobj(content, file)
            os.utime(incoming, (member.mtime, member.mtime))
            incoming.replace(path)
