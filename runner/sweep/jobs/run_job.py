"""Runs a job of a sweep in the job's own process, by experiment/run.py; its folder holds all that a run leaves.

A group of jobs (together.py) is run by experiment/together.py. Assignment is what a launcher tells a job beside its
configuration.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
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
    from runner.experiment.together import Job

#: what a job knows of its sweep, for launchers that hand on nothing but overrides
VARIABLE = "RUNNER_JOB"
#: the status of a job that was to be trained with others and can't be
ALONE = "alone"


@dataclass(frozen=True)
class Assignment:
    """What a job is told besides its configuration; plain values, for a launcher may carry it as text."""

    sweep: str  # the sweep's folder
    uid: str  # of the sweep's own run in MLflow
    experiment: str
    name: str
    publishes: bool = True  # False: the sweep sends its journal
    device: str | None = None  # None: the job chooses by its own `device=`
    device_reason: str = ""
    device_here: str | None = None  # what the job's process calls it
    study: str | None = None  # of a search: where its study lies
    trial: int | None = None
    metric: str | None = None  # that decides whether the trial goes on

    def as_text(self) -> str:
        """Letters and digits alone, so that it passes through any command line."""
        return "j" + json.dumps(asdict(self)).encode().hex()

    @classmethod
    def from_text(cls, text: str) -> Assignment:
        return cls(**json.loads(bytes.fromhex(text[1:])))


def run_pickled(payload: bytes) -> int:
    """In the job's process: runs what a launcher composed. Returns the exit code."""
    config, context = pickle.loads(payload)  # from our own parent
    returned = run_composed(config, context)
    value = returned._return_value
    return int(value.code) if hasattr(value, "code") else 1


def run_pickled_together(payload: bytes) -> int:
    """The same for jobs that are trained together: (configuration, Assignment.as_text()) of each; of how many groups this is
    one, and the threads that it may take. ALONE where they can't be."""
    each, context, (num_groups, num_threads) = pickle.loads(payload)  # from our own parent
    from runner.device import backends, host_memory
    from runner.experiment.together import Job

    backends.limit_threads(num_threads)
    host_memory.share(num_groups)
    jobs = []
    for config, text in each:
        returned = run_composed(config, context, begun)  # its folder and Hydra's files
        cfg, folder = returned.return_value
        jobs.append(Job(cfg, folder, _context(Assignment.from_text(text))))
    summaries = in_turns(jobs)
    return max((summary.code for summary in summaries), default=0)


def in_turns(jobs: Sequence[Job]) -> list[Summary]:
    """Has all of them trained, as many together as can be; after a word to end no others begin. Returns their summaries."""
    from runner.experiment.summary import Summary
    from runner.experiment.together import CannotStackError, failed, run_together
    from runner.training.signals import listening

    summaries: list[Summary] = []
    with listening() as stop:
        while jobs and stop.signal is None:
            try:
                found = run_together(jobs)
            except CannotStackError as error:
                for job in jobs:
                    Summary(ALONE, str(error)).write(job.folder)
                break
            except OF_CODE as error:
                why = _told(error)
                found = {number: failed(job, why) for number, job in enumerate(jobs)}
            summaries += found.values()
            jobs = [job for number, job in enumerate(jobs) if number not in found]
    return summaries


def begun(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """Of a job that is trained with others: its configuration and its folder, in the place of task()."""
    from hydra.core.hydra_config import HydraConfig

    from runner.config.compose import name_data

    name_data(cfg)
    return cfg, Path(HydraConfig.get().runtime.output_dir)


def run_composed(config: DictConfig, context: Any, function: Callable[[DictConfig], Any] | None = None) -> JobReturn:
    """Runs one composed job as Hydra does: its folder, its log, its callbacks. function: None for task()."""
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
    """What a job does, wherever it runs. Returns its summary, which is in its folder, too, and raises nothing."""
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
        summary = Summary("failed", _told(error), exit_code=1)
    summary.write(folder)
    return summary


def _told(error: BaseException) -> str:
    if isinstance(error, RunnerError):
        say(f"\n{error}")
        return on_a_line(error)
    print(traceback_of(error), file=sys.stderr)
    return without_password(in_words(error))


def _context(assigned: Assignment) -> RunContext:
    from runner.device import Choice
    from runner.experiment.context import Membership, RunContext
    from runner.sweep.search.pruning import StudyTrial

    choice = Choice(assigned.device, assigned.device_reason, assigned.device_here) if assigned.device else None
    member = Membership(assigned.sweep, assigned.uid, assigned.experiment, assigned.name, assigned.publishes)
    trial = None
    if assigned.study is not None and assigned.trial is not None and assigned.metric is not None:
        trial = StudyTrial(assigned.study, assigned.trial, metric=assigned.metric)
    return RunContext(device=choice, member=member, trial=trial)
