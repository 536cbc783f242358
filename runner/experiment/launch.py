"""Starts the processes of a run by torch's launcher, passes signals on to them, and says how they ended.

Called by processes.py in the process that was asked for the run, which does not train; each of them is rank.py.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.distributed import messages
from runner.training import signals
from runner.version import PACKAGES

MEMBER = "runner.experiment.rank"  # the module that each process is
ELASTIC = "torch.distributed.elastic"


@dataclass(frozen=True)
class Outcome:
    """How the processes ended."""

    asked: signal.Signals | None = None  # by which signal a person wanted the end
    failure: str | None = None  # which process died, and how; None: all came to an end of their own
    attempt: int = 0  # how often they were started again


def launch(folder: Path, *, num: int, max_restarts: int, environment: Mapping[str, str]) -> Outcome:
    """Starts `python -m runner.experiment.rank FOLDER` so many times, waits until all have ended, and passes signals on to them.

    environment: what they get besides this process's own variables. When one dies, the others are ended, and all are
    started again as often as `max_restarts` says. Outside the main thread Python hears of no signals.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    result: list[Outcome] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            _agent(folder, num, max_restarts)
            result.append(Outcome())
        except ChildFailedError as error:
            # a process that was killed before one that says that it misses it
            rank, code = min(((rank, each.exitcode) for rank, each in error.failures.items()), key=lambda it: it[1] > 0)
            result.append(Outcome(failure=_how(rank, code), attempt=max_restarts))
        except BaseException as error:
            errors.append(error)

    with _environment(environment), _quiet(), signals.heard() as heard:
        thread = threading.Thread(target=work, name="runner-ranks")
        thread.start()
        asked: signal.Signals | None = None
        sent: list[dict[int, int]] = []  # for each signal, who has it
        try:
            while thread.is_alive():
                thread.join(0.05)
                while len(sent) < len(heard):
                    asked = asked or heard[len(sent)]
                    (folder / messages.FOLDER / messages.STOPPING).touch()
                    sent.append({})
                for number, those in zip(heard, sent, strict=True):
                    _pass_on(folder, number, those)
        except BaseException:  # nobody waits for them any more
            _pass_on(folder, signal.SIGKILL, {})
            thread.join()
            raise
    if errors:
        raise errors[0]
    return Outcome(asked, result[0].failure, result[0].attempt)


def _agent(folder: Path, num: int, max_restarts: int) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num,
            run_id=f"runner-{os.getpid()}-{time.time_ns()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        # -P: a folder `runner` of the person's must not take this package's place
        elastic_launch(config, sys.executable)("-P", "-m", MEMBER, str(folder))


def _pass_on(folder: Path, number: signal.Signals, sent: dict[int, int]) -> None:
    for file in (folder / messages.FOLDER).glob("*.pid"):
        with suppress(OSError, ValueError):  # it is just being written, or over
            pid = int(file.read_text())
            if pid not in sent:
                sent[pid] = 1
                os.kill(pid, number)


def _how(rank: int, code: int) -> str:
    if code < 0:
        return f"process {rank} was ended by {signal.Signals(-code).name}"
    return f"process {rank} ended with exit code {code}"


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    if sys.platform == "darwin":  # gloo looks for the machine's name, which a Mac's network often does not know
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    os.environ.update({"PYTHONPATH": os.pathsep.join(paths), **more})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    from torch.distributed import launcher  # noqa: F401  # makes its loggers

    names = [
        name for name in logging.Logger.manager.loggerDict if name.startswith((ELASTIC, "torch.distributed.launch"))
    ]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def die_with(parent: int, *, grace_seconds: float, end: Callable[[], None]) -> None:
    """Ends this process once the one that launched it is gone, also by SIGKILL: a SIGTERM, then time to save, then `end`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        end()

    threading.Thread(target=watch, name="runner-parent", daemon=True).start()
