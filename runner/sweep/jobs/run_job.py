"""Run a job of a sweep in its process with experiment/run.py, or a group of jobs with run_together.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import CODE_ERRORS
from runner.experiment.terminal import print_failure

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from runner.experiment.context import RunContext
    from runner.experiment.summary import Summary


def run_pickled(payload: bytes) -> int:
    """In the job's process: run a composed configuration in a RunContext. Returns the exit code."""
    config, hydra_context, context = pickle.loads(payload)  # from the parent process
    value = run_composed(config, hydra_context, partial(task, context=context))._return_value
    return int(value.code) if hasattr(value, "code") else 1


def run_pickled_together(payload: bytes) -> int:
    """In the process of a group: run its jobs together.

    payload: A configuration and RunContext per job, the number of groups, and the threads for this one.
    """
    each, hydra_context, (num_groups, num_threads) = pickle.loads(payload)  # from the parent process
    from runner.device import backends, host_memory
    from runner.sweep.jobs.run_together import PlannedRun, in_turns

    backends.limit_threads(num_threads)
    host_memory.share(num_groups)
    jobs = []
    for config, context in each:
        cfg, folder = run_composed(config, hydra_context, begun).return_value  # its folder and Hydra's files
        jobs.append(PlannedRun(cfg, folder, context))
    return max((summary.code for summary in in_turns(jobs)), default=0)


def begun(cfg: DictConfig) -> tuple[DictConfig, Path]:
    """Stands for task() in Hydra's run of a member: keeps its configuration and directory."""
    from hydra.core.hydra_config import HydraConfig

    return cfg, Path(HydraConfig.get().runtime.output_dir)


def run_composed(config: DictConfig, hydra_context: Any, function: Callable[[DictConfig], Any]) -> JobReturn:
    """Run a composed job as Hydra does, with its directory, log and callbacks."""
    from hydra import version
    from hydra.core.utils import JobRuntime, run_job, setup_globals

    version.setbase("1.3")
    setup_globals()
    JobRuntime.instance().set("name", config.hydra.job.name)
    return run_job(
        hydra_context=hydra_context,
        task_function=function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def task(cfg: DictConfig, *, context: RunContext) -> Summary:
    """Run a job on any launcher. Returns its summary, which is also in its directory; never raises."""
    from hydra.core.hydra_config import HydraConfig

    from runner.experiment import run
    from runner.experiment.summary import Summary

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        return run.run(cfg, folder, context=context)
    except CODE_ERRORS as error:
        summary = Summary("failed", print_failure(error), exit_code=1)
    summary.write(folder)
    return summary
