"""Open the sweep's launcher, and adapt submitit's for a sweep (hydra/launcher=slurm): Slurm's queue, or processes on this machine.

In the sweep's process, Scheduled holds the queued jobs; scheduled_task() runs in a job's process.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from hydra.core.plugins import Plugins
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.config.identity import quoted
from runner.config.importing import restored
from runner.config.packages import not_installed
from runner.config.validate import written
from runner.device import Hardware
from runner.errors import Problem, RunnerError
from runner.experiment.claim import CONSOLE
from runner.experiment.summary import Summary
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.jobs.run_job import VARIABLE, Assignment, task
from runner.sweep.jobs.slots import DevicesFor, anywhere, devices_for
from runner.sweep.launchers import slurm
from runner.sweep.launchers.local import Slots
from runner.sweep.launchers.process_pool import Ended, NotTakenError, ProcessPool
from runner.version import python_path


@contextmanager
def open_launcher(context: Any, config: DictConfig, *, imports: tuple[str, ...] = ()) -> Iterator[Any]:
    """Open the launcher that hydra/launcher names: ours, or submitit's in our adapter; close it at the end.

    imports: Modules that all jobs share, for launchers with preloaded processes.
    """
    slurm.check_there(config)
    launcher: Any
    if str(config.hydra.launcher._target_).startswith(slurm.PLUGIN):
        theirs = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        launcher = slurm.Scheduled(theirs, config)
    else:
        launcher = instantiate(config.hydra.launcher)
        launcher.setup(hydra_context=context, task_function=task, config=config)
    if isinstance(launcher, Slots):
        launcher.preload += imports
    try:
        yield launcher
    finally:
        launcher.close()


PLUGIN = "hydra_plugins.hydra_submitit_launcher"
#: submitit's parameters that request GPUs; jobs with device=cpu get none
OF_GPUS = ("gpus_per_node", "gpus_per_task", "cpus_per_gpu", "mem_per_gpu")
#: parameters for which Slurm refuses a job
OFTEN_WRONG = ("partition", "account", "qos", "constraint", "gres", "timeout_min", "mem_gb", *OF_GPUS)
SECONDS_BETWEEN_LOOKS = 20.0  # submitit's interval for sacct is up to 10 minutes: a failure would be seen too late
SECONDS_FOR_FILES = 5.0  # delay after which a network file system shows a file that another machine wrote
#: Slurm's states of jobs that were ended from outside
ENDED_BY_OTHERS = ("CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE", "INTERRUPTED")


class Scheduled:
    """Jobs in a scheduler's queue. The scheduler decides when they run; each ends independently of the others."""

    follows = False

    def __init__(self, launcher: Any, config: DictConfig) -> None:
        self._launcher, self._folder = launcher, Path(config.hydra.sweep.dir)
        launcher.task_function = scheduled_task
        self.is_here = launcher._EXECUTOR == "local"
        logging.getLogger(PLUGIN).setLevel(logging.WARNING)  # it would print each job's whole assignment
        self._batch: list[tuple[PreparedJob, Assignment]] = []
        self._jobs: dict[int, Any] = {}  # submitit's, by our number
        self._done_at: dict[int, float] = {}
        self._folders: dict[int, Path] = {}
        self._asked_at = time.monotonic()
        self._is_stopping = False
        self._process_pool: ProcessPool | None = None

    @property
    def devices_for(self) -> DevicesFor:
        return devices_for if self.is_here else anywhere

    def process_pool(self) -> ProcessPool:
        if self._process_pool is None:
            self._process_pool = ProcessPool({}, preload=("torch",))
        return self._process_pool

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        return "processes on this machine, by submitit" if self.is_here else "Slurm's queue, by submitit"

    def start(self, prepared: PreparedJob, assigned: Assignment) -> str | None:
        self._batch.append((prepared, assigned))
        self._folders[prepared.job.number] = self._folder / prepared.job.folder_name
        return str(OmegaConf.select(prepared.config, "device"))

    def ended(self, seconds: float) -> list[Ended]:
        batch, self._batch = self._batch, []
        for on_cpu in (True, False):  # one array each, as all jobs of an array request the same resources
            part = [one for one in batch if (one[0].policy == ("cpu",)) == on_cpu]
            if part and (said := self._submit(part, on_cpu=on_cpu)):
                given = [prepared.job.number for prepared, _ in batch]
                raise NotTakenError(self._refused(said), [number for number in given if number not in self._jobs])
        found = [number for number in list(self._jobs) if self._is_done(number)]
        if not found:
            time.sleep(seconds)
        return [self._farewell(number) for number in found]

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        self._is_stopping = True
        for job in self._jobs.values():
            if self.is_here:
                _signal_here(int(job.job_id), what)
            else:
                job.cancel(check=False)  # SIGTERM at once, SIGKILL after Slurm's KillWait

    def close(self) -> None:
        if self._jobs:
            self.stop(signal.SIGKILL)
        if self._process_pool is not None:
            self._process_pool.close()
        self._process_pool = None

    def _submit(self, batch: list[tuple[PreparedJob, Assignment]], *, on_cpu: bool) -> str:
        from submitit.core.utils import FailedJobError  # an optional dependency, checked by check_there()

        parameters = dict(self._launcher.params)
        if on_cpu:
            self._launcher.params |= {name: None for name in OF_GPUS if name in parameters}
        # `python -m submitit` searches the current directory for modules first: a user's directory `runner` would shadow
        # this package, and a fractions.py Python's module, also if this process runs with -P
        path = python_path(own=True)
        if not self.is_here:  # not in sbatch's environment: at some sites sbatch is a custom script
            setup = ["export PYTHONSAFEPATH=1", f'export PYTHONPATH={shlex.quote(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"']
            self._launcher.params["setup"] = [*(parameters.get("setup") or ()), *setup]
        variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path} if self.is_here else {}
        numbers = [prepared.job.number for prepared, _ in batch]
        try:
            with _no_waiting() as handed, _ctrl_c_is_ours(), _environment(variables):
                self._launcher.launch([overrides_of(*one, self._folder) for one in batch], initial_job_idx=min(numbers))
        except FailedJobError as error:
            return " ".join(str(error).replace("sbatch: error: ", "").split()) or "sbatch failed, and said nothing"
        finally:
            self._launcher.params = parameters
        self._jobs |= dict(zip(numbers, handed, strict=True))
        return ""

    def _refused(self, said: str) -> Problem:
        params = self._launcher.params
        asked = [f"hydra.launcher.{name}={params[name]}" for name in OFTEN_WRONG if params.get(name) is not None]
        fix = "use a partition of `sinfo`, an account of `sacctmgr show assoc`, and GPUs that a node has"
        return Problem(
            " ".join(asked) or "hydra/launcher=slurm", said, f"{fix}; `sweep.resume=last` continues the jobs"
        )

    def _is_done(self, number: int) -> bool:
        if number not in self._done_at:
            every = 2.0 if self._is_stopping else SECONDS_BETWEEN_LOOKS
            asks = not self.is_here and time.monotonic() - self._asked_at > every
            if asks:
                self._asked_at = time.monotonic()
            if not self._jobs[number].done(force_check=asks):  # one query for all jobs
                return False
            self._done_at[number] = time.monotonic()
        waited = time.monotonic() - self._done_at[number]
        return self.is_here or waited > SECONDS_FOR_FILES or bool(Summary.read(self._folders[number]).status)

    def _farewell(self, number: int) -> Ended:
        job, folder = self._jobs.pop(number), self._folders[number]
        del self._done_at[number]
        for log in (job.paths.stdout, job.paths.stderr):
            if log.is_file() and log.stat().st_size:
                link_console(log, folder)
        if Summary.read(folder).status == "killed" and not self._is_stopping:
            return Ended(number, None, is_interrupted=True)
        state = job.state.partition(" ")[0].upper()
        told = "its process ended" if self.is_here else f"Slurm says {state} of job {job.job_id}"
        code = None if state in ENDED_BY_OTHERS else 1
        return Ended(number, code, f"{told}, and it left no summary")


def overrides_of(prepared: PreparedJob, assigned: Assignment, folder: Path) -> list[str]:
    """Return the job's overrides for submitit, which passes nothing else to the job.

    They include the store: the job composes its configuration again, but does not replace the store of an untrusted directory.
    """
    words = prepared.job.overrides
    is_named = any(word.lstrip("+").startswith("tracking.uri=") for word in words)
    return [
        *words,
        *([] if is_named else [f"tracking.uri={quoted(written(prepared.config.tracking, 'uri'))}"]),
        f"hydra.sweep.dir={quoted(str(folder))}",
        f"hydra.sweep.subdir='{prepared.job.folder_name}'",
        f"+hydra.job.env_set.{VARIABLE}={assigned.as_text()}",
    ]


def link_console(log: Path, folder: Path) -> None:
    """Make a job's output its console.log, by a hard link: no command reads a run directory with a symbolic link out of it."""
    link = folder / CONSOLE
    with suppress(OSError):  # file systems without hard links
        folder.mkdir(exist_ok=True)
        if link.is_symlink() or (link.exists() and link.stat().st_nlink > 1):  # from before the run was resumed
            link.unlink()
        link.hardlink_to(log)  # fails if the job has written a file of that name


def check_there(config: DictConfig) -> None:
    """Raises: RunnerError if the launcher is submitit's, and submitit or Slurm is not installed here."""
    target = str(config.hydra.launcher._target_)
    if not target.startswith(PLUGIN):
        return
    asked = f"hydra/launcher={config.hydra.runtime.choices.get('hydra/launcher')}"
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(PLUGIN) is not None:
            if target.endswith("SlurmLauncher") and shutil.which("srun") is None:
                problem = "there is no Slurm on this machine: `srun` is not found"
                fix = "run the same line on the cluster's login node, or use `hydra/launcher=slots`"
                raise RunnerError.of(asked, problem, fix)
            return
    raise not_installed(asked, "hydra-submitit-launcher is not installed", "slurm")


def scheduled_task(cfg: DictConfig) -> Summary:
    """Run a job under a scheduler. Before its time limit it saves its state, and is queued again if that is allowed."""
    asked: list[int] = []
    # submitit's handler queues the job again, and ends the process immediately
    handler = signal.getsignal(signal.SIGUSR2)

    def end(number: int, frame: Any) -> None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and callable(handler):
            handler(number, frame)  # the training has not begun
        else:
            asked.append(number)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR2, end)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
    try:
        summary = task(cfg)
    finally:
        signal.signal(signal.SIGUSR2, handler)
    if asked and summary.status == "killed" and callable(handler):
        handler(asked[0], None)
    return summary


@contextmanager
def _no_waiting() -> Iterator[list[Any]]:
    import submitit

    handed: list[Any] = []
    submit = submitit.AutoExecutor.map_array

    def map_array(executor: Any, function: Any, *arguments: Any) -> list[Submitted]:
        handed.extend(submit(executor, function, *arguments))
        return [Submitted() for _ in handed]

    submitit.AutoExecutor.map_array = map_array  # type: ignore[assignment, method-assign]
    try:
        yield handed
    finally:
        submitit.AutoExecutor.map_array = submit  # type: ignore[method-assign]


class Submitted:
    """The plugin gets this instead of a job, so that it does not wait."""

    def results(self) -> list[None]:
        return [None]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in variables:
            stack.enter_context(restored(name))
        os.environ |= variables
        yield


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_here(pid: int, what: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *(process.children(recursive=True) if what == signal.SIGKILL else [])]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(what)
