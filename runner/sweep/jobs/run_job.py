"""Run a job of a sweep in its process with experiment/run.py, or a group of jobs with run_together.py."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import OF_CODE, RunnerError, in_words, on_a_line, traceback_of, without_password
from runner.experiment.terminal import say

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from runner.experiment.context import RunContext
    from runner.experiment.summary import Summary

#: status of a job that can't be trained together with its group
ALONE = "alone"
#: environment variable with the Assignment, for launchers that pass only overrides
VARIABLE = "RUNNER_JOB"


@dataclass(frozen=True)
class Assignment:
    """Arguments of a job in addition to its configuration; plain values, as a launcher may pass them as text."""

    sweep: str  # the sweep directory
    uid: str  # of the sweep's run in MLflow
    experiment: str
    name: str
    publishes: bool = True  # False: the sweep sends its journal
    device: str | None = None  # None: the job chooses by its own `device=`
    device_reason: str = ""
    device_here: str | None = None  # what the job's process calls it
    study: str | None = None  # of a search: the path of its study
    trial: int | None = None
    metric: str | None = None  # for pruning the trial

    def as_text(self) -> str:
        """Return it as letters and digits, which need no quoting."""
        return "j" + json.dumps(asdict(self)).encode().hex()

    @classmethod
    def from_text(cls, text: str) -> Assignment:
        return cls(**json.loads(bytes.fromhex(text[1:])))


def run_pickled(payload: bytes) -> int:
    """In the job's process: run a composed configuration. Returns the exit code."""
    config, context = pickle.loads(payload)  # from the parent process
    value = run_composed(config, context)._return_value
    return int(value.code) if hasattr(value, "code") else 1


def run_pickled_together(payload: bytes) -> int:
    """In the process of a group: run its jobs together.

    payload: A configuration and Assignment.as_text() per job, the number of groups, and the threads for this one.
    """
    each, context, (num_groups, num_threads) = pickle.loads(payload)  # from the parent process
    from runner.device import backends, host_memory
    from runner.sweep.jobs.run_together import PlannedRun, in_turns

    backends.limit_threads(num_threads)
    host_memory.share(num_groups)
    jobs = []
    for config, text in each:
        cfg, folder = run_composed(config, context, begun).return_value  # its folder and Hydra's files
        jobs.append(PlannedRun(cfg, folder, _context(Assignment.from_text(text))))
    return max((summary.code for summary in in_turns(jobs)), default=0)


def begun(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """Stands for task() in Hydra's run of a member: keeps its configuration and directory."""
    from hydra.core.hydra_config import HydraConfig

    from runner.config.compose import name_data

    name_data(cfg)
    return cfg, Path(HydraConfig.get().runtime.output_dir)


def run_composed(config: DictConfig, context: Any, function: Callable[[DictConfig], Any] | None = None) -> JobReturn:
    """Run a composed job as Hydra does, with its directory, log and callbacks. function: None: task()."""
    from hydra import version
    from hydra.core.utils import JobRuntime, run_job, setup_globals

    version.setbase("1.3")
    setup_globals()
    JobRuntime.instance().set("name", config.hydra.job.name)
    return run_job(
        hydra_context=context,
        task_function=function or task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def task(cfg: DictConfig) -> Summary:
    """Run a job on any launcher. Returns its summary, which is also in its directory; never raises."""
    from hydra.core.hydra_config import HydraConfig

    from runner.config.compose import name_data
    from runner.experiment import run
    from runner.experiment.summary import Summary

    folder = Path(HydraConfig.get().runtime.output_dir)
    assigned = Assignment.from_text(os.environ[VARIABLE])
    name_data(cfg)
    try:
        return run.run(cfg, folder, context=_context(assigned))
    except OF_CODE as error:
        summary = Summary("failed", print_error(error), exit_code=1)
    summary.write(folder)
    return summary


def print_error(error: BaseException) -> str:
    if isinstance(error, RunnerError):
        say(f"\n{error}")
        return on_a_line(error)
    print(traceback_of(error), file=sys.stderr)
    return without_password(in_words(error))


def _context(assigned: Assignment) -> RunContext:
    from runner.device import Choice
    from runner.experiment.context import Membership, RunContext
    from runner.sweep.search.study import StudyTrial

    choice = Choice(assigned.device, assigned.device_reason, assigned.device_here) if assigned.device else None
    member = Membership(assigned.sweep, assigned.uid, assigned.experiment, assigned.name, assigned.publishes)
    trial = None
    if assigned.study is not None and assigned.trial is not None and assigned.metric is not None:
        trial = StudyTrial(assigned.study, assigned.trial, metric=assigned.metric)
    return RunContext(device=choice, member=member, trial=trial)
