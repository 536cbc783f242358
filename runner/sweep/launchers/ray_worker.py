"""Runs a job on a machine of a Ray cluster, in an actor there, and tells how it ended, with its folder if none is shared.

ray.py asks for it and hands it the job; it keeps the job's process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runner.sweep.launchers.job_files import pack, unpack
from runner.sweep.launchers.process_pool import ProcessPool
from runner.sweep.launchers.worker import Request

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Home:
    """Where the person is. A machine that finds `word` in `mark` shares the person's files."""

    folder: str  # the person's own
    mark: str  # a file in the sweep's folder
    word: str


@dataclass(frozen=True)
class Arrival:
    """Where Ray has put a job."""

    node_id: str
    job_files: str | None  # the job's folder there; None where it is the one in the person's files


class Site:
    """One job's place: an actor of Ray's, in a process of its own, which holds what the job takes of the machine.

    The job is a process below it, so that it can be told to save its state, and so that a crash has its exit code. When
    the actor goes, for whatever reason, its job gets a SIGTERM and its grace (runner.sweep.launchers.worker). All methods run in
    one thread.
    """

    def __init__(self, home: Home, environment: dict[str, str]) -> None:
        """environment: added to what Ray gives the job."""
        self._is_home = _shares(home)
        if self._is_home and Path(home.folder).is_dir():
            os.chdir(home.folder)  # relative paths in the configuration mean the person's
        self._job_files = None if self._is_home else tempfile.mkdtemp(prefix="runner-job-")
        self._process_pool = ProcessPool(environment)

    async def arrived(self) -> Arrival:
        import ray

        return Arrival(ray.get_runtime_context().get_node_id(), self._job_files)

    async def run(self, request: Request, job_files: bytes) -> tuple[int | None, bytes]:
        """The exit code, or minus the signal; and the job's folder, packed, where it did not run in the person's files.

        luggage: what the folder holds already, packed.
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
        return Path(home.mark).read_text() == home.word
    except OSError:
        return False
