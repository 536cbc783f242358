"""Start jobs in processes that are forked from a preloaded one (worker.py), signal them, and return how they ended."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from runner.errors import Problem, RunnerError
from runner.sweep.launchers.worker import LENGTH, Request
from runner.version import python_path

#: a fork copies locked locks, which Apple's libraries don't support
FORKS = sys.platform == "linux"
CLOSE_SECONDS = 10.0
LAST_EVENT_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """How a job's process ended: its exit code, or minus the signal's number; None: unknown."""

    number: int
    code: int | None
    cause: str | None = None  # if a launcher knows it
    is_interrupted: bool = False  # by a time limit; it has saved its state and can be resumed


class NotTakenError(RunnerError):
    """A queue refuses jobs: none of these numbers has started."""

    def __init__(self, problem: Problem, numbers: Sequence[int]) -> None:
        super().__init__(problem)
        self.numbers = tuple(numbers)


class ProcessPool:
    """Starts jobs in processes of one environment, forked from a process that has imported `preload`.

    Use it from one thread. `fileno()` is readable when `ended()` has news.
    """

    def __init__(self, environment: Mapping[str, str], *, preload: Sequence[str] = (), forks: bool = FORKS) -> None:
        """Starts the warm process and returns at once.

        environment: added to this process's. forks: Otherwise each job takes a warm process.
        """
        self._environment, self._preload, self._forks = dict(environment), tuple(preload), forks
        self._lifeline, self._alive = os.pipe()  # the jobs' end, and ours: it closes when we do
        self._events, self._reports = os.pipe()
        os.set_blocking(self._events, False)
        self._pids: dict[int, int] = {}  # number → pid, of the running jobs; 0: not known yet
        self._early: dict[int, tuple[signal.Signals, bool]] = {}  # signals for jobs without a process yet
        self._singles: dict[int, subprocess.Popen[bytes]] = {}  # without fork: the process of each job
        self._ended: list[Ended] = []  # for the next ended()
        self._rest = b""
        self._warm = self._start_warm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._events

    @property
    def running(self) -> list[int]:
        """The numbers of the running jobs."""
        return list(self._pids)

    def start(self, request: Request) -> None:
        """Queue a job; it starts when the preloaded process is ready."""
        if self._warm.poll() is not None:  # it was killed, or an import failed
            self._look()  # at its jobs, which the next process does not know
            _hang_up(self._warm)
            self._warm = self._start_warm()
        self._pids[request.number] = 0
        body = pickle.dumps(request)
        assert self._warm.stdin is not None
        with suppress(BrokenPipeError):  # ended() reports it
            self._warm.stdin.write(LENGTH.pack(len(body)) + body)
            self._warm.stdin.flush()
        if not self._forks:
            self._singles[request.number], self._pids[request.number] = self._warm, self._warm.pid
            self._warm = self._start_warm()

    def ended(self) -> list[Ended]:
        """Return the jobs that ended since the last call. Never waits."""
        self._look()
        jobs, self._ended = self._ended, []
        return jobs

    def signal(self, number: int, what: signal.Signals, *, whole_group: bool = False) -> None:
        """Signal a running job, or one that is about to start. whole_group: also its child processes."""
        pid = self._pids.get(number)
        if pid == 0:
            self._early[number] = what, whole_group
        elif pid:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if whole_group else os.kill)(pid, what)

    def close(self) -> None:
        """End the preloaded process. Running jobs get SIGTERM, and SIGKILL after their grace time, at most 10 s."""
        os.close(self._alive)
        if not (self._forks and self._pids):
            self._warm.terminate()  # it has no jobs: don't wait for its imports
        processes = [self._warm, *self._singles.values()]
        for process in processes:
            _hang_up(process)
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        for fd in (self._events, self._reports, self._lifeline):
            os.close(fd)

    def _start_warm(self) -> subprocess.Popen[bytes]:
        fds = (self._reports, self._lifeline)
        arguments = [",".join(self._preload), "0", *map(str, fds), *(["fork"] if self._forks else [])]
        return subprocess.Popen(
            # -P: a user's directory `runner` must not replace this package
            [sys.executable, "-P", "-W", "ignore", "-m", "runner.sweep.launchers.worker", *arguments],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path(own=True), **self._environment},
            pass_fds=fds,
            start_new_session=True,
        )

    def _look(self) -> None:
        """Read the news, and add the jobs that have ended to `_ended`."""
        is_gone = self._warm.poll() is not None  # read before its last news, else some jobs would count as lost
        for event in self._news():
            number = event["number"]
            if process := self._singles.get(number):  # its last event: it ends at once
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LAST_EVENT_SECONDS)
            elif self._forks and "code" in event:
                del self._pids[number]
                self._ended.append(Ended(number, event["code"]))
            elif self._forks:
                self._pids[number] = event["pid"]
                if early := self._early.pop(number, None):
                    self.signal(number, early[0], whole_group=early[1])
        for number, process in list(self._singles.items()):
            if (code := process.poll()) is not None:
                del self._singles[number], self._pids[number]
                _hang_up(process)
                self._ended.append(Ended(number, code))
        if is_gone and self._forks:  # its jobs are lost
            for number in self._pids:
                self.signal(number, signal.SIGKILL, whole_group=True)
                self._ended.append(Ended(number, None))
            self._pids.clear()
            self._early.clear()  # else the next job with that number would get it

    def _news(self) -> list[dict[str, Any]]:
        with suppress(BlockingIOError):
            while chunk := os.read(self._events, 65536):
                self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def call(process_pool: ProcessPool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, computed in a process of the pool. Function and values must be picklable.

    Raises:
        Exception: The function's; RuntimeError with the process's output if it ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer", Path(folder) / "log"
        payload = pickle.dumps((function, arguments, str(answer)))
        process_pool.start(Request(-1, "runner.sweep.launchers.process_pool:answer", payload, str(log)))
        while not any(ended.number == -1 for ended in process_pool.ended()):
            select.select([process_pool], [], [], 0.2)
        if not answer.exists():
            output = log.read_text() if log.exists() else ""
            raise RuntimeError(f"a process ended without an answer\n{output}")
        is_error, value = pickle.loads(answer.read_bytes())
    if is_error:
        raise value
    return value


def answer(payload: bytes) -> int:
    """In the process: call the function, and write the result to a file."""
    function, arguments, path = pickle.loads(payload)
    try:
        result = False, function(*arguments)
    except Exception as error:
        result = True, error
    Path(path).with_suffix(".writing").write_bytes(pickle.dumps(result))
    Path(path).with_suffix(".writing").replace(path)
    return 0
