"""Request a forked Python from a preloaded process, for processes that are not its forks (Ray's, Slurm's).

DOOR in the environment names the socket on which serve() waits (the fixture `warm_door`).
This module imports little, so that the requesting process saves the imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

DOOR = "RUNNER_TESTS_DOOR"
MAX_BYTES = 1 << 20  # of a command line and its environment
Asked = tuple[list[str], str, dict[str, str]]  # arguments after `python`, directory, environment


def say(line: socket.socket, asked: Asked, streams: Sequence[int]) -> None:
    socket.send_fds(line, [pickle.dumps(asked)], list(streams))
    line.shutdown(socket.SHUT_WR)


def heard(line: socket.socket) -> tuple[Asked, list[int]]:
    text, streams, *_ = socket.recv_fds(line, MAX_BYTES, 3)
    while chunk := line.recv(MAX_BYTES):
        text += chunk
    return pickle.loads(text), list(streams)


class Forked:
    """`python WORDS` with the directory, the environment and the streams of this process, in a separate session."""

    def __init__(self, words: Sequence[str], *, streams: Sequence[int] = (0, 1, 2)) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(os.environ[DOOR])
        say(self._line, (list(words), str(Path.cwd()), dict(os.environ)), streams)
        self._told = self._line.makefile()
        self.pid = int(self._told.readline())

    def wait(self) -> int:
        """Return the exit code, or minus the signal."""
        return int(self._told.readline())


def serve(payload: bytes) -> None:
    """In the preloaded process: fork a program for each connection, and report its pid and its exit code."""
    from forked_programs import be_started  # imports much

    path, imported = pickle.loads(payload)
    for name in imported:
        importlib.import_module(name)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    askers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{path}.new")
        door.listen(64)
        Path(f"{path}.new").rename(path)
        while True:
            ready, _, _ = select.select([door, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                tell_ends(askers)
            if door in ready:
                line, _ = door.accept()
                asked, streams = heard(line)
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    be_started(asked, streams, kept=(), own_session=True)
                for fd in streams:
                    os.close(fd)
                line.sendall(b"%d\n" % pid)
                askers[pid] = line


def tell_ends(askers: dict[int, socket.socket]) -> None:
    for pid in list(askers):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with askers.pop(pid) as line, contextlib.suppress(OSError):  # the requesting process has ended
                line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
