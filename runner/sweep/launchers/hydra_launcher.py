"""A launcher of somebody else's goes in; one comes out that a sweep can hand jobs to, a batch at a time."""

from __future__ import annotations

import pickle
import re
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import untrusted
from runner.device import Hardware
from runner.experiment.summary import read_summary
from runner.sweep.jobs.prepare import Prepared
from runner.sweep.jobs.run_job import VARIABLE, Assignment, task
from runner.sweep.jobs.slots import DevicesFor, anywhere, devices_for
from runner.sweep.launchers.local import CONSOLE
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.worker import Request
from runner.training.signals import listening

#: launchers whose jobs run on other machines
ELSEWHERE = ("RayAWSLauncher", "RQLauncher")
LOG = "launcher.log"  # in the sweep's folder: what the launcher and its jobs print
BATCH = -2  # the number of the process that does a batch


class Foreign:
    """Hydra's launchers take all jobs at once and answer when the last one has ended.

    So each batch has a process of its own: a job that takes the launcher down with it is a row, and those that had not
    begun are another batch.
    """

    follows = False  # whose processes its jobs are, nobody knows

    def __init__(self, config: DictConfig, context: Any) -> None:
        self._config, self._context = config, context
        self._folder = Path(config.hydra.sweep.dir)
        target = str(config.hydra.launcher._target_)
        self.is_here = not target.endswith(ELSEWHERE)
        self._name = target.rsplit(".", 1)[-1]
        self._waiting: list[tuple[Prepared, Assignment]] = []
        self._batch: list[tuple[Prepared, Assignment]] = []
        self._began = 0.0
        self._is_stopping = False
        self._nursery: ProcessPool | None = None

    @property
    def devices_for(self) -> DevicesFor:
        return devices_for if self.is_here else anywhere

    def nursery(self) -> ProcessPool:
        if self._nursery is None:
            self._nursery = ProcessPool({}, preload=("torch",))
        return self._nursery

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        return f"as {self._name} has them; what the jobs print is in {LOG}"

    def start(self, prepared: Prepared, assigned: Assignment) -> str | None:
        self._waiting.append((prepared, assigned))
        return str(OmegaConf.select(prepared.config, "device"))

    def ended(self, seconds: float) -> list[Ended]:
        if not self._batch and self._waiting and not self._is_stopping:
            self._launch()
        select.select([self.nursery()], [], [], seconds)
        codes = [ended.code for ended in self.nursery().ended() if ended.number == BATCH]
        if codes:
            return self._farewells(codes[0])
        if self._is_stopping and not self._batch:  # those that never began
            left, self._waiting = self._waiting, []
            return [Ended(prepared.job.number, None) for prepared, _ in left]
        return []

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        self._is_stopping = True
        self.nursery().signal(BATCH, what, whole_group=True)

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
        self._nursery = None

    def _launch(self) -> None:
        self._batch, self._waiting, self._began = self._waiting, [], time.time()
        first = min(prepared.job.number for prepared, _ in self._batch)
        words = [overrides_of(*one, self._folder) for one in self._batch]
        payload = payload_of(self._config, self._context, words, first)
        self.nursery().start(
            Request(BATCH, "runner.sweep.launchers.hydra_launcher:launch", payload, str(self._folder / LOG))
        )

    def _farewells(self, code: int | None) -> list[Ended]:
        """Of the jobs that have run. What has not, after the launcher died, waits for another batch."""
        batch, self._batch = self._batch, []
        begun = [one for one in batch if self._has_begun(one[0])]
        if code and begun and not self._is_stopping:
            self._waiting += [one for one in batch if one not in begun]
            batch = begun
        ended = []
        for prepared, _ in batch:
            link_console(self._folder / LOG, self._folder / prepared.job.folder_name)
            is_told = "status" in read_summary(self._folder / prepared.job.folder_name)
            cause = f"{self._name}'s process {_how(code)}; {LOG} says more"
            ended.append(Ended(prepared.job.number, code, None if is_told else cause))
        return ended

    def _has_begun(self, prepared: Prepared) -> bool:
        folder = self._folder / prepared.job.folder_name
        marks = [folder / ".hydra" / "config.yaml", folder / "summary.json"]
        return any(mark.is_file() and mark.stat().st_mtime >= self._began for mark in marks)


def overrides_of(prepared: Prepared, assigned: Assignment, folder: Path) -> list[str]:
    """What a launcher gets that hands on nothing but overrides.

    The store is said, too: where such a job composes again, nobody looks at what the folder of somebody else names.
    """
    words = prepared.job.overrides
    is_named = any(word.lstrip("+").startswith("tracking.uri=") for word in words)
    return [
        *words,
        *([] if is_named else [f"tracking.uri={_quoted(_written(prepared.config.tracking, 'uri'))}"]),
        f"hydra.sweep.dir={folder}",
        f"hydra.sweep.subdir='{prepared.job.folder_name}'",
        f"+hydra.job.env_set.{VARIABLE}={assigned.as_text()}",
    ]


def link_console(log: Path, folder: Path) -> None:
    """Makes what a job printed, wherever its launcher put it, its console.log: the file itself, for no command reads a
    run's folder with a symbolic link that leads out of it."""
    link = folder / CONSOLE
    with suppress(OSError):  # where there are no links
        folder.mkdir(exist_ok=True)
        if link.is_symlink() or (link.exists() and link.stat().st_nlink > 1):  # of an earlier part
            link.unlink()
        link.hardlink_to(log)  # not over a file that the job has of that name


def payload_of(config: DictConfig, context: Any, words: list[list[str]], first: int) -> bytes:
    """What launch() takes."""
    return pickle.dumps((config, context, words, first, untrusted.is_trusted()))


def launch(payload: bytes) -> int:
    """In the batch's process: hands the jobs to the launcher. A stop ends the job that runs, and the batch with it."""
    from hydra import version
    from hydra.core.plugins import Plugins
    from hydra.core.utils import JobRuntime, setup_globals

    from runner.config import schema
    from runner.config.compose import hydra_session

    config, context, words, first, is_trusted = pickle.loads(payload)  # from our own parent
    schema.register()
    version.setbase("1.3")
    setup_globals()
    JobRuntime.instance().set("name", config.hydra.job.name)
    with hydra_session(["runner"]), untrusted.trusting(is_trusted), listening() as stop:
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task_or_end, config=config
        )
        launcher.launch(words, initial_job_idx=first)
    return stop.exit_code


def task_or_end(cfg: DictConfig) -> dict[str, Any]:
    """A job that was told to end takes its batch with it: launchers would go on with the next."""
    summary = task(cfg)
    if summary.get("exit_code", 0) >= 128:
        raise SystemExit(summary["exit_code"])
    return summary


def _written(node: DictConfig, name: str) -> str:
    """A value as it stands there, its ${...} not followed: what the environment holds is no word of a command."""
    child: Any = node._get_node(name)
    return str(child._value())


def _quoted(text: str) -> str:
    """As Hydra's grammar reads it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code is not None else "was killed"
