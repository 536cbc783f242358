"""Reads a run, or a sweep's runs, from an MLflow store as results for `runner compare`."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from runner.config.identity import NOT_CHOSEN
from runner.errors import RunnerError
from runner.sweep.mlflow_parent import MAX_SEEDS
from runner.sweep.report.results import BestOfJob, JobResult, as_fold
from runner.tasks.metric_names import is_rising
from runner.tracking import mlflow_store, store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

STATES = {"FINISHED": "finished", "RUNNING": "running", "KILLED": "killed", "FAILED": "failed"}
PARENT = "mlflow.parentRunId"
MOST_RUNS = 1000


def read_stored(run_id: str, *, uri: str) -> tuple[list[JobResult], int | None]:
    """Return the run of this id, or the jobs of the sweep and its max_seeds. Imports MLflow (1 s); one request per run.

    Raises:
        RunnerError: When the store does not answer, or has no such run.
    """
    command, problem = f"compare {run_id}", f"there is no directory and no run `{run_id}` here"
    fix = f"name a directory, or the store: `{command} tracking.uri=URI`"
    path = store_uri.sqlite_path(uri)
    if path is not None and not path.is_file():  # opening it would make it
        raise RunnerError.of(command, f"{problem}, and there is no store {store_uri.shown(uri)}", fix)
    try:
        with mlflow_store.settings():
            client = mlflow_store.open_store(uri)
            run = client.get_run(run_id)
            runs, most = _jobs(client, run_id) or [run], run.data.tags.get(MAX_SEEDS)
            results = [_result(client, number, each, _differing(runs)) for number, each in enumerate(runs)]
            return results, int(most) if most else None
    except Exception as error:
        raise RunnerError.of(command, f"{problem}; the store: {mlflow_store.explain(error, uri=uri)}", fix) from error


def _as_sent(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def _jobs(client: MlflowClient, run_id: str) -> list[Run]:
    experiments = [each.experiment_id for each in client.search_experiments()]
    query = f"tags.`{PARENT}` = '{run_id}'"
    page = client.search_runs(experiments, query, max_results=MOST_RUNS)
    jobs = list(page)
    while page.token:
        page = client.search_runs(experiments, query, max_results=MOST_RUNS, page_token=page.token)
        jobs += page
    return sorted(jobs, key=lambda job: int(job.info.start_time))


def _differing(runs: list[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.data.params)
    left_out = (*NOT_CHOSEN, "name", "tracking.")
    known = [name for name in names if not name.startswith(left_out)]
    return [name for name in known if len({run.data.params.get(name) for run in runs}) > 1]


def _result(client: MlflowClient, number: int, run: Run, differing: list[str]) -> JobResult:
    params = run.data.params
    metric = params.get("train.early_stopping.metric", "None")
    metric = "val/loss" if metric in ("None", "null", "") else metric
    mode = params.get("train.early_stopping.mode", "None")
    mode = mode if mode in ("min", "max") else "max" if is_rising(metric) else "min"
    seed = params.get("seed", "")
    points = client.get_metric_history(run.info.run_id, metric) if metric in run.data.metrics else []
    known = [point for point in points if math.isfinite(_as_sent(point.value))]
    best = None
    if known:
        found = (min if mode == "min" else max)(known, key=lambda point: point.value)
        best = BestOfJob(metric, mode, found.value, found.step, None, None)
    metrics = {name: _as_sent(value) for name, value in run.data.metrics.items()}
    state = STATES.get(str(run.info.status), "running")
    return JobResult(
        number,
        str(run.info.run_name),
        (),
        {name: str(params[name]) for name in differing if name in params},
        state,
        "",
        int(seed) if seed.isdecimal() else 0,
        as_fold(params.get("data.fold", ""), params.get("data.num_folds", "")),
        metrics=metrics,
        best=best,
        run_id=run.info.run_id,
        diverged=state == "failed"
        and not all(math.isfinite(metrics[name]) for name in metrics if name.startswith("train/")),
    )
