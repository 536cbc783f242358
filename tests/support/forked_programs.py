"""`[sys.executable, "-m", ...]` goes in, as subprocess.Popen takes it; the process is forked from one that has imported much.

process = warm.program([sys.executable, "-m", "runner.tracking", folder], stdin=subprocess.PIPE, env=environment)

It is as real as any: with a session, a folder, an environment and streams of its own. What it has of the warm process is
its modules, so the start itself, and what is not imported, are not to be tested with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import LONGEST

if TYPE_CHECKING:
    from shared_nursery import Warm

MOST_BYTES = 1 << 20  # of a command line and its environment


class Program(subprocess.Popen):
    """A Python process whose parent is the warm one, which tells how it ended."""

    warm: Warm

    def _execute_child(self, args: Any, executable: Any, *more: Any) -> None:
        if not isinstance(args, list) or args[0] != sys.executable:
            raise FileNotFoundError(args)
        _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = more
        wanted = (p2cread, c2pwrite, errwrite)
        streams = [number if fd == -1 else fd for number, fd in enumerate(wanted)]
        asked = ([str(word) for word in args[1:]], str(cwd or Path.cwd()), dict(os.environ if env is None else env))
        try:
            with a_door() as door:
                self._number = self.warm.start_program(door.getsockname())
                self.pid = hand_over(asked, streams, door)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self.warm.code_of(self._number)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        deadline = time.monotonic() + (LONGEST if timeout is None else timeout)
        while (code := self._internal_poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or LONGEST)
            select.select([self.warm.nursery], [], [], 0.02)
        return code


def hand_over(asked: Any, streams: Sequence[int], door: socket.socket) -> int:
    """Gives the process that comes to the door what it is to be. Returns its pid."""
    door.settimeout(LONGEST)
    line, _ = door.accept()
    with line:
        socket.send_fds(line, [pickle.dumps(asked)], list(streams))
        line.shutdown(socket.SHUT_WR)
        return int(line.recv(16))


def become(payload: bytes) -> int:
    """In the process: takes its streams, its folder and its environment, and is `python WORDS`."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(pickle.loads(payload))
        asked, streams, *_ = socket.recv_fds(line, MOST_BYTES, 3)
        while chunk := line.recv(MOST_BYTES):
            asked += chunk
        words, folder, environment = pickle.loads(asked)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        line.sendall(str(os.getpid()).encode())
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    run_python(words)
    return 0


def run_python(words: list[str]) -> None:
    """As `python WORDS` would, with -P, -W ignore, -c and -m."""
    if "-P" not in (flags := words[: next(place for place, word in enumerate(words) if word in ("-c", "-m"))]):
        sys.path.insert(0, str(Path.cwd()))
    if "ignore" in flags:
        warnings.simplefilter("ignore")
    kind, what, *rest = words[len(flags) :]
    if what == "mlflow":
        serve_in_this_process()
    sys.argv = [kind, *rest]
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def serve_in_this_process() -> None:
    """`mlflow server` starts another Python for its app: it becomes that itself."""
    import mlflow.server

    def be(command: list[str], *, extra_env: dict[str, str], **_: Any) -> None:
        os.environ.update(extra_env)
        run_python(command[1:])

    mlflow.server._exec_cmd = be


@contextlib.contextmanager
def a_door():
    """A socket in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(1)
        yield door
