"""Fork the jobs of sweeps, and whole commands, from one preloaded process per test session.

with opened() as warm:
    warm.stand_in                                        # the class that replaces a sweep's ProcessPool, in this process
    warm.command(folder, "-m", "seed=1,2", SOME="thing")   # `python -m runner -m seed=1,2`, as subprocess.Popen gives it
    warm.program([sys.executable, "-m", "module"])         # replaces subprocess.Popen (forked_programs.py)

A command is a process with a separate session, directory and environment. The Python processes that it starts are forked from
it, instead of new ones that import the same modules for seconds.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from forked_programs import Program, become
from waiting import LONGEST, wait_for
from warm_door import serve

from runner.sweep.launchers import local
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.worker import Request
from runner.sweep.search import preload as search_preload

PRELOAD = ("no_looking", *local.PRELOAD, search_preload.__name__, "preloaded")
COMMANDS = 1_000_000  # the numbers of commands and programs start here, above any job's


class Warm:
    """The preloaded process, and the exit codes of the commands that it has started."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        self.nursery = ProcessPool({"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}, preload=PRELOAD)
        self.commands: list[Program] = []
        self.stand_in = type("Shared", (Shared,), {"warm": self})
        self.program = type("Program", (Program,), {"warm": self})
        self._turn = threading.RLock()  # a thread waits for a publishing process
        self._numbers = itertools.count(COMMANDS)
        self._codes: dict[int, int | None] = {}
        self._ended_jobs: list[Ended] = []

    def start(self, request: Request, folder: Path, environment: dict[str, str]) -> None:
        """Start a request in another directory and environment."""
        payload = pickle.dumps((str(folder), environment, request.function, request.payload))
        with self._turn:
            self.nursery.start(replace(request, function=f"{__name__}:enter", payload=payload))

    def start_program(self, door: str) -> int:
        """Start a process that connects to the socket for its arguments. Returns its number."""
        number = next(self._numbers)
        with self._turn:
            function = f"{become.__module__}:{become.__name__}"
            self.nursery.start(Request(number, function, pickle.dumps(door), os.devnull))
        return number

    @contextmanager
    def door(self, *imported: str) -> Iterator[str]:
        """Yield a socket where other processes can request a fork (warm_door.py), with these additional imports."""
        with tempfile.TemporaryDirectory() as folder:
            path, number = f"{folder}/door", next(self._numbers)
            request = Request(
                number, f"{serve.__module__}:{serve.__name__}", pickle.dumps((path, imported)), f"{folder}/log"
            )
            with self._turn:
                self.nursery.start(request)
            wait_for(lambda: Path(path).exists() or self.code_of(number) is not None, "the door")
            yield path
            self.nursery.signal(number, signal.SIGKILL)
            wait_for(lambda: self.code_of(number) is not None)

    def ended(self) -> list[Ended]:
        """Return the jobs that have ended; store the exit codes of commands and programs."""
        with self._turn:
            for ended in self.nursery.ended():
                if ended.number < COMMANDS:
                    self._ended_jobs.append(ended)
                else:
                    self._codes[ended.number] = ended.code
            found, self._ended_jobs = self._ended_jobs, []
            return found

    def code_of(self, number: int) -> int | None:
        """Return the exit code of a command or program, or None if it runs. Jobs that have ended are kept for ended()."""
        with self._turn:
            self._ended_jobs = self.ended()
            return self._codes.get(number)

    def command(self, folder: Path, *words: str, **environment: str) -> Program:
        """Start `python -m runner WORDS` in the folder; `stdout` includes its stderr."""
        command = self.program(
            [sys.executable, "-m", "runner", *words],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands.append(command)
        return command


class Shared(ProcessPool):
    """Replaces a sweep's process pool: its jobs run in the sweep's directory and environment."""

    warm: Warm

    def __init__(self, environment: Mapping[str, str], *, preload: Sequence[str] = ()) -> None:
        self._added = dict(environment)

    def fileno(self) -> int:
        return self.warm.nursery.fileno()

    @property
    def running(self) -> list[int]:
        return [number for number in self.warm.nursery.running if number < COMMANDS]

    def start(self, request: Request) -> None:
        self.warm.start(request, Path.cwd(), {**os.environ, **self._added, **request.environment})

    def ended(self) -> list[Ended]:
        return self.warm.ended()

    def signal(self, number: int, what: signal.Signals, *, whole_group: bool = False) -> None:
        self.warm.nursery.signal(number, what, whole_group=whole_group)

    def close(self) -> None:
        """End the remaining processes like a sweep's pool, by force after some seconds."""
        for what, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, LONGEST)):
            for number in self.running:
                self.signal(number, what, whole_group=what == signal.SIGKILL)
            deadline = time.monotonic() + seconds
            while self.running and time.monotonic() < deadline:
                select.select([self], [], [], 0.2)
                self.ended()


@contextmanager
def opened() -> Iterator[Warm]:
    warm = Warm()
    try:
        yield warm
    finally:
        for command in warm.commands:  # from a test that failed
            command.kill()
            command.stdout.close()
            command.wait()
        warm.nursery.close()


def enter(payload: bytes) -> int:
    """In the process: set the directory and the environment, and call the requested function."""
    folder, environment, function, asked = pickle.loads(payload)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(1, folder)
    module, _, name = function.partition(":")
    return int(getattr(importlib.import_module(module), name)(asked) or 0)
