"""The preloaded process that jobs are forked from: `python -m runner.sweep.launchers.worker PRELOAD`, started by process_pool.py.

It imports torch and the runner once, and then forks for each request, so that a job starts in milliseconds. Where a fork is
not safe (macOS), each process runs one request.

A job ends with the requesting process, also after SIGKILL: it reads from a pipe that closes with that process, then gets a
SIGTERM, and some seconds to save its state.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    """One job: `function(payload)`."""

    number: int
    function: str  # module:name
    payload: bytes
    log: str  # the file for the job's output
    environment: dict[str, str] = field(default_factory=dict)
    grace_seconds: float = 30.0  # to save its state after the requesting process has ended


def main(argv: list[str]) -> None:
    """Run the process. argv: the modules to import first, and the numbers of its three pipes."""
    preload, requests, events, lifeline = argv[0], *map(int, argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the requesting process
    gc.disable()
    for name in filter(None, preload.split(",")):
        importlib.import_module(name)
    gc.freeze()  # a collection in a job would copy the pages of these objects
    gc.enable()
    if argv[4:] == ["fork"]:
        _fork_for_each(requests, events, lifeline)
    elif (request := _read(requests)) is not None:
        _do(request, lifeline, events)


@contextmanager
def folder_for_now() -> Iterator[Path]:
    """Return a temporary directory for the preloaded modules; it is also removed after a SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork_for_each(requests: int, events: int, lifeline: int) -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _wake_up)
    running: dict[int, int] = {}  # pid → number
    sources = [requests]
    while sources or running:  # until the last job has ended, with its child processes
        ready, _, _ = select.select([*sources, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        for number, pid, code in _ended(running):
            with suppress(BrokenPipeError):  # the requesting process has ended
                _tell(events, {"number": number, "pid": pid, "code": code})
        if requests not in ready:
            continue
        request = _read(requests)
        if request is None:
            sources = []
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()  # Ctrl-C in the terminal is for the requesting process; signals to the group reach data workers
            signal.set_wakeup_fd(-1)
            for fd in (events, woken, wake):  # `requests` is stdin, which the job replaces
                os.close(fd)
            _do(request, lifeline)
        running[pid] = request.number
        _tell(events, {"number": request.number, "pid": pid})


def _ended(running: dict[int, int]) -> list[tuple[int, int, int]]:
    ended = []
    while running:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            break
        pid = info.si_pid
        _end_group(pid)  # before waitpid(), while its id is not used again
        _, status = os.waitpid(pid, 0)
        ended.append((running.pop(pid), pid, os.waitstatus_to_exitcode(status)))
    return ended


def _do(request: Request, lifeline: int, events: int | None = None) -> NoReturn:
    """Run the job, with its output in its log, and exit with its exit code.

    events: Receives a line before the exit; None if a parent process reports the exit.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(request.log).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, fd)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(request.environment)
    threading.Thread(target=_end_with_owner, args=(lifeline, request.grace_seconds), daemon=True).start()
    module, _, name = request.function.partition(":")
    code = 1
    try:
        code = int(getattr(importlib.import_module(module), name)(request.payload) or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if events is not None:
        with suppress(OSError):  # the requesting process has ended
            _tell(events, {"number": request.number, "code": code & 0xFF})
    os._exit(code & 0xFF)  # not sys.exit: exit handlers of the preloaded process are not the job's


def _end_with_owner(lifeline: int, grace_seconds: float) -> None:
    while os.read(lifeline, 1):  # returns when the pipe closes: the requesting process has ended
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)
    os.killpg(0, signal.SIGKILL)


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of only zombies
        os.killpg(pid, signal.SIGKILL)


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Python's handler; the wake-up pipe does the work."""


def _read(fd: int) -> Request | None:
    head = _read_exactly(fd, LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(fd, LENGTH.unpack(head)[0])
    request: Request | None = None if body is None else pickle.loads(body)  # from the parent process
    return request


def _read_exactly(fd: int, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        part = os.read(fd, count - len(parts))
        if not part:
            return None
        parts += part
    return parts


def _tell(fd: int, event: dict[str, Any]) -> None:
    os.write(fd, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    from runner.sweep.launchers import worker  # requests are of that module's class, not of __main__'s class

    worker.main(sys.argv[1:])
