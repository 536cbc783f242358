"""Replace subprocess.Popen for `[sys.executable, "-m", ...]`: fork the process from one that has already imported most modules.

process = warm.program([sys.executable, "-m", "runner.tracking"], stdin=subprocess.PIPE, env=environment)

The process has a session, a directory, an environment and streams like any other. It inherits the modules of the preloaded
process, so it can't test the start itself or what is imported. The processes that it starts (a sweep's process pool, ranks,
the publishing process) are forked from it in the same way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import logging
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
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.global_hydra import GlobalHydra
from waiting import LONGEST
from warm_door import Asked, heard, say

if TYPE_CHECKING:
    from shared_nursery import Warm

START = subprocess.Popen._execute_child
#: the ends of the three streams, by Popen's names
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def asked_of(args: Sequence[Any], how: dict[str, Any]) -> Asked:
    environment = os.environ if how["env"] is None else how["env"]
    return [str(word) for word in args[1:]], str(how["cwd"] or Path.cwd()), dict(environment)


def streams_of(how: dict[str, Any]) -> list[int]:
    ends = (how["p2cread"], how["c2pwrite"], how["errwrite"])
    return [number if fd == -1 else fd for number, fd in enumerate(ends)]


class Program(subprocess.Popen):
    """A Python process whose parent is the preloaded one, which reports its exit code."""

    warm: Warm

    def _execute_child(self, args: Any, *more: Any) -> None:
        if isinstance(args, str) or args[0] != sys.executable:
            raise FileNotFoundError(args)
        how = inspect.signature(subprocess.Popen._execute_child).bind(self, args, *more).arguments
        try:
            with a_door() as door:
                self._number = self.warm.start_program(door.getsockname())
                self.pid = hand_over(asked_of(args, how), streams_of(how), door)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(how[name] for name in PIPES))

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
    """Send the new process at the socket its arguments and streams. Returns its pid."""
    door.settimeout(LONGEST)
    line, _ = door.accept()
    with line:
        say(line, asked, streams)
        return int(line.recv(16))


def become(payload: bytes) -> int:
    """In the process: take over its streams, directory and environment, and run `python WORDS`."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(pickle.loads(payload))
        asked, streams = heard(line)
        take(asked, streams)
        for fd in streams:
            os.close(fd)
        line.sendall(str(os.getpid()).encode())
    run_python(asked[0])
    return 0


def take(asked: Asked, streams: Sequence[int]) -> None:
    """Set this process's streams, directory and environment."""
    _, folder, environment = asked
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    fork_what_is_started()


def popen_is(start: Callable[..., Any]) -> Iterator[tuple[str, types.SimpleNamespace]]:
    """Yield the replacements for `subprocess` in the modules that start Python for a run or a plan."""
    for module in ("runner.tracking.ahead", "runner.tools.plan.command"):
        yield f"{module}.subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


def run_python(words: list[str]) -> None:
    """Run `python WORDS`, with a sitecustomize.py, -P, -W ignore, -u, -c, -m and a script."""
    place = next(place for place, word in enumerate(words) if word in ("-c", "-m") or word.endswith(".py"))
    flags, (kind, *rest) = words[:place], words[place:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    customize(words, paths)
    own = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith(("_", "n_"))}
    is_safe = "-P" in flags or bool(os.environ.get("PYTHONSAFEPATH"))
    sys.flags = types.SimpleNamespace(**{**own, "safe_path": is_safe})  # the preloaded process runs with -P
    if not is_safe:
        sys.path.insert(0, str(Path(kind).parent if kind.endswith(".py") else Path.cwd()))
    if "ignore" in flags:
        warnings.simplefilter("ignore")
    if kind.endswith(".py"):
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
        return
    what, *rest = rest
    if what == "mlflow":
        serve_in_this_process()
    sys.argv = [kind, *rest]
    if kind == "-m":
        Path("/proc/self/comm").write_text(what[:15])  # its command line is that of the preloaded process
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def customize(words: list[str], paths: list[str]) -> None:
    """Import a sitecustomize.py that a test has put on the path, as Python does when it starts."""
    if any(Path(path, "sitecustomize.py").exists() for path in paths):
        sys.orig_argv = [sys.executable, *words]
        sys.modules.pop("sitecustomize", None)  # from the process that this one is forked from
        importlib.import_module("sitecustomize")


def fork_what_is_started() -> None:
    """From now on, fork every Python that this process starts."""
    subprocess.Popen._execute_child = _execute_child


def _execute_child(process: subprocess.Popen, args: Any, *more: Any) -> None:
    if isinstance(args, str) or args[0] != sys.executable:
        START(process, args, *more)
        return
    how = inspect.signature(START).bind(process, args, *more).arguments
    asked, streams = asked_of(args, how), streams_of(how)
    sys.stdout.flush()
    process.pid = os.fork()
    if process.pid == 0:
        be_started(asked, streams, kept=how["pass_fds"], own_session=how["start_new_session"])
    process._child_created = True
    process._close_pipe_fds(*(how[name] for name in PIPES))


def be_started(asked: Asked, streams: Sequence[int], *, kept: Sequence[int], own_session: bool) -> NoReturn:
    """In a fork: run like a new Python, except for the imported modules, and exit with its exit code."""
    code = 1
    gc.freeze()  # do not free the parent's objects here: Ray would use threads that a fork does not have
    try:
        if own_session:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        take(asked, streams)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, nothing, *kept}:
            # not closed: an object of the parent that is freed later would close a reused number, once the file of a
            # lock
            os.dup2(nothing, fd, inheritable=False)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        logging.getLogger().handlers.clear()
        GlobalHydra.instance().clear()
        run_python(asked[0])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def serve_in_this_process() -> None:
    """`mlflow server` starts another Python for its app: run the app in this process instead."""
    import mlflow.server

    def be(command: list[str], *, extra_env: dict[str, str], **_: Any) -> None:
        os.environ.update(extra_env)
        run_python(command[1:])

    mlflow.server._exec_cmd = be


@contextlib.contextmanager
def a_door() -> Iterator[socket.socket]:
    """Yield a socket in a temporary directory."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(1)
        yield door
