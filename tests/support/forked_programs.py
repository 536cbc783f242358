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
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import LONGEST

if TYPE_CHECKING:
    from shared_nursery import Warm

MOST_BYTES = 1 << 20  # of a command line and its environment


Asked = tuple[list[str], str, dict[str, str]]  # words after `python`, folder, environment


class Forking(subprocess.Popen):
    """A Python process that is a fork of this one: for a command, which is one of the warm process itself."""

    def _execute_child(self, args: Any, executable: Any, *more: Any) -> None:
        assert args[0] == sys.executable, args
        _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = more
        streams = [number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        asked = ([str(word) for word in args[1:]], str(cwd or Path.cwd()), dict(os.environ if env is None else env))
        try:
            self.pid = self._fork(asked, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _fork(self, asked: Asked, streams: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            take(asked, streams)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            run_python(asked[0])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code & 0xFF)


class Program(Forking):
    """A Python process whose parent is the warm one, which tells how it ended."""

    warm: Warm

    def _fork(self, asked: Asked, streams: Sequence[int]) -> int:
        with a_door() as door:
            self._number = self.warm.start_program(door.getsockname())
            return hand_over(asked, streams, door)

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


def hand_over(asked: Asked, streams: Sequence[int], door: socket.socket) -> int:
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
        take(pickle.loads(asked), streams)
        for fd in streams:
            os.close(fd)
        line.sendall(str(os.getpid()).encode())
    run_python(pickle.loads(asked)[0])
    return 0


def take(asked: Asked, streams: Sequence[int]) -> None:
    """This process has these streams, this folder and this environment from now on."""
    _, folder, environment = asked
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def popen_is(start: Callable[..., Any]) -> Iterator[tuple[str, types.SimpleNamespace]]:
    """What is to stand in the place of `subprocess` in the modules that start Python beside a run or a plan."""
    for module in ("runner.tracking.publisher", "runner.plan.command"):
        yield f"{module}.subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


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
def a_door() -> Iterator[socket.socket]:
    """A socket in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(1)
        yield door
