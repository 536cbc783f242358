"""Fork Python processes from one per test session that has already imported most modules (the fixtures `warm...`).

process = warm.program([sys.executable, "-m", "module"], stdin=subprocess.PIPE)   # replaces subprocess.Popen
process = warm.command(folder, "-m", "seed=1,2", SOME="thing")                    # python -m runner -m seed=1,2

A process has a session, a directory, an environment and streams like any other. It inherits the modules of the preloaded
process, so it can't test the start itself or what is imported. The Python processes that it starts (a sweep's process pool,
ranks, the publishing process) are forked from it in the same way.

Processes that are not its forks (Ray's, Slurm's) reach the preloaded process at the socket that DOOR in the environment names.
The module imports little, so that these processes save the imports.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import inspect
import logging
import math
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from waiting import LONGEST

DOOR = "RUNNER_TESTS_DOOR"
MAX_BYTES = 1 << 20  # of a command line and its environment
MAX_FDS = 16
HIGH_FD = 500  # above the numbers that a process expects its streams at
START = subprocess.Popen._execute_child
#: the ends of the three streams, by Popen's names
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PRELOAD = """
shortcuts runner.sweep.launchers.preload runner.sweep.search.preload runner.sweep.grid runner.sweep.report.figures
runner.tools.plan.worker runner.tracking.__main__ torch._subclasses.fake_tensor torch.fx.experimental.symbolic_shapes
torchmetrics plotly.graph_objects uvicorn.protocols.http.h11_impl mlflow.cli mlflow.pytorch mlflow.server.fastapi_app
mlflow.store.tracking.sqlalchemy_store
"""


def request(
    door: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], fds: Mapping[int, int]
) -> socket.socket:
    """Request `python WORDS`. Returns a line with its pid, and later its exit code. fds: from numbers there to numbers here."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(door)
    payload = pickle.dumps(([str(word) for word in words], str(folder), dict(environment), list(fds)))
    socket.send_fds(line, [payload], list(fds.values()))
    line.shutdown(socket.SHUT_WR)
    return line


def number_from(line: socket.socket) -> int:
    return int(line.recv(16, socket.MSG_WAITALL))


class Forked:
    """`python WORDS` with the directory, the environment and the streams of this process, in a separate session."""

    def __init__(self, words: Sequence[str], *, streams: Sequence[int] = (0, 1, 2)) -> None:
        self._line = request(os.environ[DOOR], words, Path.cwd(), os.environ, dict(enumerate(streams)))
        self.pid = number_from(self._line)

    def wait(self) -> int:
        """Return the exit code, or minus the signal."""
        return number_from(self._line)


class Program(subprocess.Popen):
    """A Python process whose parent is the preloaded one, which reports its exit code."""

    door: str

    def _execute_child(self, args: Any, *more: Any) -> None:
        if isinstance(args, str) or args[0] != sys.executable:
            raise FileNotFoundError(args)
        how = inspect.signature(START).bind(self, args, *more).arguments
        try:
            self._line = request(self.door, args[1:], *place_of(how))
            self.pid = number_from(self._line)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(how[name] for name in PIPES))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._waitpid_lock:
            if self.returncode is None and select.select([self._line], [], [], 0)[0]:
                with self._line as line:
                    self.returncode = number_from(line)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        deadline = time.monotonic() + (LONGEST if timeout is None else timeout)
        while (code := self._internal_poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or LONGEST)
            time.sleep(0.01)
        return code


def place_of(how: dict[str, Any]) -> tuple[Path, Mapping[str, str], dict[int, int]]:
    """Return the directory, the environment and the files of a process, from Popen's arguments."""
    streams = (how["p2cread"], how["c2pwrite"], how["errwrite"])
    fds = {number: number if fd == -1 else fd for number, fd in enumerate(streams)}
    return how["cwd"] or Path.cwd(), how["env"] or os.environ, fds | {fd: fd for fd in how["pass_fds"]}


class Warm:
    """Starts processes: door is the socket of the preloaded process."""

    def __init__(self, door: str) -> None:
        self.door = door
        self.program = type("Program", (Program,), {"door": door})

    def command(self, folder: Path, *words: str, **environment: str) -> Program:
        """Start `python -m runner WORDS` in the folder; `stdout` includes its stderr."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "runner", *words]
        return self.program(command, cwd=folder, env={**os.environ, **environment}, **streams)

    def replace_popen(self, patch: Any, *modules: str) -> None:
        """Let these modules of the runner start forked processes."""
        for module in modules:
            patch.setattr(f"{module}.subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": self.program}))


@contextlib.contextmanager
def opened() -> Iterator[Warm]:
    """Yield the preloaded process. The programs that a failed test left end with it."""
    paths = [*map(str, Path(__file__).parents[::2][:2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(64)
        code = f"import forked_programs; forked_programs.serve({door.fileno()})"
        command = [sys.executable, "-P", "-W", "ignore", "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[door.fileno()]) as process:
            try:
                yield Warm(f"{folder}/door")
            finally:
                process.terminate()


def serve(door_fd: int) -> None:
    """In the preloaded process: fork a program for each connection, and report its pid and its exit code."""
    os.setsid()  # Ctrl-C is for the tests
    preload()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    lines: dict[int, socket.socket] = {}
    door = socket.socket(fileno=door_fd)
    ready: list[Any] = []
    try:
        while 0 not in ready:  # its stdin closes when the tests have ended
            ready, _, _ = select.select([0, door, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                report_ends(lines)
            if door in ready:
                start_for(door.accept()[0], lines)
    finally:
        for pid in lines:
            end_group(pid)


def start_for(line: socket.socket, lines: dict[int, socket.socket]) -> None:
    """Fork the program that the line requests, and add it to the lines."""
    text, received, *_ = socket.recv_fds(line, MAX_BYTES, MAX_FDS)
    while chunk := line.recv(MAX_BYTES):
        text += chunk
    words, folder, environment, numbers = pickle.loads(text)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        be_started(words, folder, environment, dict(zip(numbers, received, strict=True)), own_session=True)
    for fd in received:
        os.close(fd)
    lines[pid] = line
    report(line, pid)


def preload() -> None:
    from runner.tracking import mlflow_store

    with mlflow_store.settings():  # MLflow reads its log level when it is imported
        for name in PRELOAD.split():
            importlib.import_module(name)
    import shortcuts

    from runner.config.compose import composer
    from runner.training.stacked import check

    # whether a group's jobs compute together must not depend on a measured time
    check.WORTH, check.MIN_GAIN = math.inf, -math.inf
    shortcuts.compose_once()
    shortcuts.leave_undrawn()
    composer([])([])  # loads Hydra's files and its grammar
    logging.getLogger().handlers.clear()  # the handlers of MLflow's server are not for other programs
    gc.freeze()  # a collection in a fork would visit all of these objects, and copy their pages


def report_ends(lines: dict[int, socket.socket]) -> None:
    for pid in list(lines):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            end_group(pid)  # before waitpid(), while its id is not used again
            _, status = os.waitpid(pid, 0)
            with lines.pop(pid) as line:
                report(line, os.waitstatus_to_exitcode(status))


def report(line: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the requesting process has ended
        line.sendall(b"%16d" % number)


def end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def be_started(
    words: Sequence[str], folder: str, environment: Mapping[str, str], fds: Mapping[int, int], *, own_session: bool
) -> NoReturn:
    """In a fork: run like a new Python, except for the imported modules, and exit with its exit code."""
    from hydra.core.global_hydra import GlobalHydra

    code = 1
    gc.freeze()  # do not free the parent's objects here: Ray would use threads that a fork does not have
    try:
        if own_session:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        take_files(fds)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        subprocess.Popen._execute_child = fork_python
        logging.getLogger().handlers.clear()
        GlobalHydra.instance().clear()
        run_python(list(words))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def take_files(fds: Mapping[int, int]) -> None:
    """Set this process's streams and other files, and leave it no other one of its parent's."""
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_FD) for number, fd in fds.items()}
    for number, fd in high.items():
        os.dup2(fd, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {nothing, *fds}:
        # not closed: an object of the parent that is freed later would close a reused number, once the file of a lock
        os.dup2(nothing, fd, inheritable=False)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))


def fork_python(process: subprocess.Popen, args: Any, *more: Any) -> None:
    """Replace Popen's function: fork a Python that this process starts."""
    if isinstance(args, str) or args[0] != sys.executable:
        START(process, args, *more)
        return
    how = inspect.signature(START).bind(process, args, *more).arguments
    sys.stdout.flush()
    process.pid = os.fork()
    if process.pid == 0:
        be_started([str(word) for word in args[1:]], *place_of(how), own_session=how["start_new_session"])
    process._child_created = True
    process._close_pipe_fds(*(how[name] for name in PIPES))


def run_python(words: list[str]) -> None:
    """Run `python WORDS`, with a sitecustomize.py, -P, -W ignore, -u, -c, -m and a script."""
    place = next(place for place, word in enumerate(words) if word in ("-c", "-m") or word.endswith(".py"))
    flags, (kind, *rest) = words[:place], words[place:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    if any(Path(path, "sitecustomize.py").exists() for path in paths):  # a test's, which Python imports when it starts
        sys.orig_argv = [sys.executable, *words]
        sys.modules.pop("sitecustomize", None)  # from the process that this one is forked from
        importlib.import_module("sitecustomize")
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
    sys.argv = [kind, *rest]
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        return
    if what == "mlflow":
        serve_in_this_process()
    Path("/proc/self/comm").write_text(what[:15])  # its command line is that of the preloaded process
    runpy.run_module(what, run_name="__main__", alter_sys=True)


def serve_in_this_process() -> None:
    """`mlflow server` starts another Python for its app: run the app in this process instead."""
    import mlflow.server

    def be(command: list[str], *, extra_env: dict[str, str], **_: Any) -> None:
        os.environ.update(extra_env)
        run_python(command[1:])

    mlflow.server._exec_cmd = be
