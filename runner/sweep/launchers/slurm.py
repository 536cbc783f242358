"""The launcher for Slurm by submitit (hydra/launcher=slurm): each job waits in Slurm's queue, and ends independently.

It reads the settings of Hydra's plugin for submitit. Queue is in the sweep's process, and QueuedJob runs in a job's process.
"""

from __future__ import annotations

import importlib.util
import pickle
import shlex
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config.packages import not_installed
from runner.device import Hardware
from runner.errors import Problem, RunnerError
from runner.experiment.context import RunContext
from runner.experiment.directory import CONSOLE
from runner.experiment.summary import Summary
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.jobs.run_job import run_composed, task
from runner.sweep.launchers.local import Capacity, anywhere
from runner.sweep.launchers.process_pool import Ended, NotTakenError, ProcessPool
from runner.version import python_path

PLUGIN = "hydra_plugins.hydra_submitit_launcher"
#: submitit's parameters that request GPUs; jobs with device=cpu get none
GPU_SETTINGS = ("gpus_per_node", "gpus_per_task", "cpus_per_gpu", "mem_per_gpu")
#: parameters that all of submitit's executors have; the names of others begin with the executor's
COMMON = (
    "name",
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "stderr_to_stdout",
)
#: parameters for which Slurm refuses a job
OFTEN_WRONG = ("partition", "account", "qos", "constraint", "gres", "timeout_min", "mem_gb", *GPU_SETTINGS)
SECONDS_BETWEEN_LOOKS = 20.0  # submitit's interval for sacct is up to 10 minutes: a failure would be seen too late
SECONDS_FOR_FILES = 5.0  # delay after which a network file system shows a file that another machine wrote
#: Slurm's states of jobs that were ended from outside
ENDED_BY_OTHERS = ("CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE", "INTERRUPTED")


class Queue:
    """Jobs in Slurm's queue. Slurm decides when they run; each ends independently of the others."""

    is_here = False
    devices_for = staticmethod(anywhere)
    preload = ("torch",)
    environment: Mapping[str, str] = {}

    def __init__(self, context: Any, config: DictConfig) -> None:
        """Raises: RunnerError if submitit or Slurm is not installed here."""
        check_installed(config)
        self._hydra_context, self._folder = context, Path(config.hydra.sweep.dir).absolute()
        settings: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        del settings["_target_"]
        self._settings: dict[str, Any] = settings
        self._batch: list[tuple[PreparedJob, RunContext]] = []
        self._jobs: dict[int, Any] = {}  # submitit's, by our number
        self._done_at: dict[int, float] = {}
        self._folders: dict[int, Path] = {}
        self._looked_at = time.monotonic()
        self._is_stopping = False

    def open(self, pool: ProcessPool, hardware: Hardware, devices: Collection[str]) -> Capacity:
        return Capacity("Slurm's queue, by submitit")

    def start(self, prepared: PreparedJob, context: RunContext) -> str | None:
        self._batch.append((prepared, context))
        self._folders[prepared.job.number] = self._folder / prepared.job.folder_name
        return str(OmegaConf.select(prepared.config, "device"))

    def ended(self, seconds: float) -> list[Ended]:
        batch, self._batch = self._batch, []
        for on_cpu in (True, False):  # one array each, as all jobs of an array request the same resources
            part = [each for each in batch if (each[0].policy == ("cpu",)) == on_cpu]
            if part and (reason := self._submit(part, on_cpu=on_cpu)):
                numbers = [prepared.job.number for prepared, _ in batch]
                raise NotTakenError(self._refusal(reason), [each for each in numbers if each not in self._jobs])
        done = [number for number in list(self._jobs) if self._is_done(number)]
        if not done:
            time.sleep(seconds)
        return [self._end_of(number) for number in done]

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        self._is_stopping = True
        for job in self._jobs.values():
            job.cancel(check=False)  # SIGTERM at once, SIGKILL after Slurm's KillWait

    def close(self) -> None:
        if self._jobs:
            self.stop(signal.SIGKILL)

    def _submit(self, batch: list[tuple[PreparedJob, RunContext]], *, on_cpu: bool) -> str:
        """Submit an array of jobs. Returns why Slurm refuses them, or ""."""
        import submitit  # an optional dependency, see check_installed()
        from submitit.core.utils import FailedJobError

        settings = dict(self._settings)
        if on_cpu:
            settings |= {name: None for name in GPU_SETTINGS if name in settings}
        # `python -m submitit` searches the current directory for modules first: a user's directory `runner` would shadow
        # this package, and a fractions.py Python's module, also if this process runs with -P
        # not in sbatch's environment: at some sites sbatch is a custom script
        path = f'export PYTHONPATH={shlex.quote(python_path(own=True))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        settings["setup"] = [*(settings.get("setup") or ()), "export PYTHONSAFEPATH=1", path]
        limits = {f"slurm_{name}": settings.pop(name) for name in ("max_num_timeout",) if name in settings}
        try:
            with _without_ctrl_c():
                executor = submitit.AutoExecutor(settings.pop("submitit_folder"), cluster="slurm", **limits)
                parameters = {name if name in COMMON else f"slurm_{name}": value for name, value in settings.items()}
                executor.update_parameters(**parameters)
                payloads = [pickle.dumps((each.config, self._hydra_context, context)) for each, context in batch]
                jobs = executor.map_array(QueuedJob(), payloads)
        except FailedJobError as error:
            return " ".join(str(error).replace("sbatch: error: ", "").split()) or "sbatch failed, and said nothing"
        self._jobs |= dict(zip([prepared.job.number for prepared, _ in batch], jobs, strict=True))
        return ""

    def _refusal(self, reason: str) -> Problem:
        names = [name for name in OFTEN_WRONG if self._settings.get(name) is not None]
        source = " ".join(f"hydra.launcher.{name}={self._settings[name]}" for name in names)
        fix = "use a partition of `sinfo`, an account of `sacctmgr show assoc`, and GPUs that a node has"
        return Problem(source or "hydra/launcher=slurm", reason, f"{fix}; `sweep.resume=last` continues the jobs")

    def _is_done(self, number: int) -> bool:
        if number not in self._done_at:
            interval = 2.0 if self._is_stopping else SECONDS_BETWEEN_LOOKS
            is_due = time.monotonic() - self._looked_at > interval
            if is_due:
                self._looked_at = time.monotonic()
            if not self._jobs[number].done(force_check=is_due):  # one query for all jobs
                return False
            self._done_at[number] = time.monotonic()
        waited = time.monotonic() - self._done_at[number]
        return waited > SECONDS_FOR_FILES or bool(Summary.read(self._folders[number]).status)

    def _end_of(self, number: int) -> Ended:
        job, folder = self._jobs.pop(number), self._folders[number]
        del self._done_at[number]
        for log in (job.paths.stdout, job.paths.stderr):
            if log.is_file() and log.stat().st_size:
                link_console(log, folder)
        if Summary.read(folder).status == "killed" and not self._is_stopping:
            return Ended(number, None, is_interrupted=True)
        state = job.state.partition(" ")[0].upper()
        code = None if state in ENDED_BY_OTHERS else 1
        return Ended(number, code, f"Slurm says {state} of job {job.job_id}, and it left no summary")


def link_console(log: Path, folder: Path) -> None:
    """Make a job's output its console.log, by a hard link: no command reads a run directory with a symbolic link out of it."""
    link = folder / CONSOLE
    with suppress(OSError):  # file systems without hard links
        folder.mkdir(exist_ok=True)
        if link.is_symlink() or (link.exists() and link.stat().st_nlink > 1):  # from before the run was resumed
            link.unlink()
        link.hardlink_to(log)  # fails if the job has written a file of that name


def check_installed(config: DictConfig) -> None:
    """Raises: RunnerError if submitit or Slurm is not installed here."""
    source = f"hydra/launcher={config.hydra.runtime.choices.get('hydra/launcher')}"
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(PLUGIN) is not None:
            if shutil.which("srun") is None:
                problem = "there is no Slurm on this machine: `srun` is not found"
                fix = "run the same line on the cluster's login node, or use `hydra/launcher=slots`"
                raise RunnerError.of(source, problem, fix)
            return
    raise not_installed(source, "hydra-submitit-launcher is not installed", "slurm")


class QueuedJob:
    """The function that submitit calls in a job's process, and again if the scheduler restarts the job."""

    def __call__(self, payload: bytes) -> None:
        import submitit

        config, hydra_context, context = pickle.loads(payload)  # from the sweep's process
        with read_write(config), open_dict(config):
            config.hydra.job.id = submitit.JobEnvironment().job_id
        run_composed(config, hydra_context, partial(queued_task, context=context))

    def checkpoint(self, *job: Any) -> Any:
        """Return the same job, for submitit to queue it again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, *job)


def queued_task(cfg: DictConfig, *, context: RunContext) -> Summary:
    """Run a job under a scheduler. Before its time limit it saves its state, and is queued again if that is allowed."""
    signals: list[int] = []
    # submitit's handler queues the job again, and ends the process immediately
    handler = signal.getsignal(signal.SIGUSR2)

    def end(number: int, frame: Any) -> None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and callable(handler):
            handler(number, frame)  # the training has not begun
        else:
            signals.append(number)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR2, end)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
    try:
        summary = task(cfg, context=context)
    finally:
        signal.signal(signal.SIGUSR2, handler)
    if signals and summary.status == "killed" and callable(handler):
        handler(signals[0], None)
    return summary


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
