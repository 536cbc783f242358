"""A batch of overrides goes in; what Hydra expects of each job comes out: our launchers for sweepers that are not ours."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from runner.experiment.terminal import say
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import Prepared, compose, examine
from runner.sweep.jobs.run_job import Assignment
from runner.sweep.launchers.process_pool import call
from runner.sweep.mlflow_parent import experiment_of, shown
from runner.sweep.scheduler import JobLauncher, settle


def run_batch(
    places: JobLauncher, context: Any, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Runs the jobs; each result holds the job's best value, or the reason why it failed. No ledger, no report."""
    jobs = [
        Job(first + index, tuple(overrides), " ".join(overrides), folder_name=str(first + index))
        for index, overrides in enumerate(job_overrides)
    ]
    prepared = [Prepared(job, compose(context.config_loader, config, job)) for job in jobs]
    hardware, *found = call(
        places.nursery(), examine, [job.config for job in prepared], places.devices_for, places.is_here
    )
    results: dict[int, JobReturn] = {}
    waiting: list[Prepared] = []
    for one, (faults, *place) in zip(prepared, found, strict=True):
        one.policy, one.devices, one.missing = place
        problem = [*faults, *([one.missing] if one.missing else [])]
        if problem:
            results[one.job.number] = _returned(one, error="; ".join(f"{fault.asked}: {fault.so}" for fault in problem))
        else:
            waiting.append(one)
    places.open(hardware, {name for one in waiting for name in one.devices})
    folder, uid = Path(config.hydra.sweep.dir).absolute(), uuid.uuid4().hex
    running: dict[int, Prepared] = {}
    while waiting or running:
        for one in list(waiting):
            assigned = Assignment(shown(folder), uid, experiment_of(one.config), one.job.name)
            if places.start(one, assigned) is not None:
                waiting.remove(one)
                running[one.job.number] = one
        for ended in places.ended(1.0):
            one = running.pop(ended.number)
            summary = settle(one.job, folder / one.job.folder_name, ended.code, is_stopped=False, cause=ended.cause)
            results[ended.number] = _returned(one, error=one.job.error, summary=summary)
            say(f"job {ended.number} {one.job.state}: {one.job.name}{f': {one.job.error}' if one.job.error else ''}")
    places.close()
    return [results[job.number] for job in jobs]


def _returned(one: Prepared, *, error: str | None, summary: dict[str, Any] | None = None) -> JobReturn:
    returned = JobReturn(
        overrides=list(one.job.overrides), hydra_cfg=OmegaConf.create({"hydra": one.config.hydra}), cfg=one.config
    )
    returned.status = JobStatus.FAILED if error else JobStatus.COMPLETED
    returned.return_value = RuntimeError(error) if error else (summary or {}).get("best", {}).get("value")
    return returned
