"""Runs a job of a sweep in the job's own process, by experiment/run.py; its folder holds all that a run leaves.

A group of jobs (together.py) is run by experiment/together.py. Assignment is what a launcher tells a job beside its
configuration.
"""

from __future__ import annotations

import json
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import OF_CODE, RunnerError, in_words, on_a_line
from runner.experiment.terminal import say

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from runner.device import Choice
    from runner.experiment.given import Given, Membership

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
    return int(value["exit_code"] or value["status"] == "failed") if isinstance(value, dict) else 1


def run_pickled_together(payload: bytes) -> int:
    """The same for jobs that are trained together: (configuration, Assignment.as_text()) of each; of how many groups this is
    one, and the threads that it may take. ALONE where they can't be."""
    each, context, (num_groups, num_threads) = pickle.loads(payload)  # from our own parent
    from runner.device import backends, host_memory
    from runner.experiment.summary import write_summary
    from runner.experiment.together import CannotStackError, Job, failed, run_together

    backends.limit_threads(num_threads)
    host_memory.share(num_groups)
    jobs = []
    for config, text in each:
        returned = run_composed(config, context, begun)  # its folder and Hydra's files
        cfg, folder = returned.return_value
        jobs.append(Job(cfg, folder, _given(Assignment.from_text(text))))
    summaries: list[dict[str, Any]] = []
    while jobs:
        try:
            found = run_together(jobs)
        except CannotStackError as error:
            for job in jobs:
                write_summary(job.folder, {"status": ALONE, "error": str(error)})
            break
        except RunnerError as error:
            say(f"\n{error}")
            found = {number: failed(job, on_a_line(error)) for number, job in enumerate(jobs)}
        except OF_CODE as error:
            traceback.print_exc()
            found = {number: failed(job, in_words(error)) for number, job in enumerate(jobs)}
        summaries += found.values()
        jobs = [job for number, job in enumerate(jobs) if number not in found]
    return max((int(summary["exit_code"] or summary["status"] == "failed") for summary in summaries), default=0)


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


def task(cfg: DictConfig) -> dict[str, Any]:
    """What a job does, wherever it runs. Returns its summary, which is in its folder, too, and raises nothing."""
    from hydra.core.hydra_config import HydraConfig

    from runner.config.compose import name_data
    from runner.experiment import run

    folder = Path(HydraConfig.get().runtime.output_dir)
    assigned = Assignment.from_text(os.environ[VARIABLE])
    name_data(cfg)
    try:
        return run.run(cfg, folder, given=_given(assigned))
    except RunnerError as error:
        text = on_a_line(error)
        say(f"\n{error}")
    except OF_CODE as error:
        traceback.print_exc()
        text = in_words(error)
    summary = {"status": "failed", "error": text, "exit_code": 1}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _given(assigned: Assignment) -> Given:
    from runner.experiment.given import Given

    return Given(choice=_choice(assigned), member=_member(assigned), trial=_trial(assigned))


def _choice(assigned: Assignment) -> Choice | None:
    from runner.device import Choice

    return Choice(assigned.device, assigned.device_reason, assigned.device_here) if assigned.device else None


def _member(assigned: Assignment) -> Membership:
    from runner.experiment.given import Membership

    return Membership(
        sweep=assigned.sweep,
        uid=assigned.uid,
        experiment=assigned.experiment,
        name=assigned.name,
        publishes=assigned.publishes,
    )


def _trial(assigned: Assignment) -> Any:
    if assigned.study is None or assigned.trial is None or assigned.metric is None:
        return None
    from runner.sweep.search.pruning import StudyTrial

    return StudyTrial(assigned.study, assigned.trial, metric=assigned.metric)
