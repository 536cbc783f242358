"""The results of a sweep's jobs, read from the ledger, the summaries and the journals, and their order, best first."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.config.validate import fold_of
from runner.errors import without_password
from runner.experiment.plots.curves import thin
from runner.experiment.summary import Summary
from runner.sweep.jobs.ledger import Job, Sweep
from runner.tracking.journal_reader import read_series

LOSS = "train/loss"
#: maximum points of a curve; of one of many jobs; of all jobs' curves
MAX_POINTS, MIN_POINTS, MAX_POINTS_OF_ALL = 1000, 120, 12_000
#: order of states; those with the same number are sorted together
RANK = {
    "finished": 0,
    "pruned": 1,
    "running": 2,
    "interrupted": 2,
    "planned": 2,
    "skipped": 3,
    "failed": 4,
    "killed": 4,
}
FAILURES = ("failed", "killed")
#: values that a result has as summary.json has them
UNCHANGED = ("run_id", "num_steps", "num_epochs", "steps_per_second", "samples_per_second")
#: final states of a job
GOOD = ("finished", "pruned", "skipped")


@dataclass(frozen=True)
class Goal:
    """A metric that jobs are ranked by."""

    metric: str
    mode: str  # min | max


@dataclass(frozen=True)
class BestOfJob:
    """The best value of a job, and the step at which it was reached."""

    metric: str
    mode: str  # min | max
    value: float | None  # None: nothing was measured
    step: int


@dataclass(frozen=True)
class MetricCurve:
    """A metric by step; each point is the mean of its bin's finite values, NaN without any."""

    steps: NDArray[np.int64]  # (n,)
    values: NDArray[np.float64]  # (n,)


@dataclass
class JobResult:
    """One job: its overrides, how it ended, its metrics."""

    job: int
    name: str
    overrides: tuple[str, ...]  # as on the command line
    keys: dict[str, str]  # the overrides by key, without Hydra's signs
    state: str
    folder: str  # in the sweep directory; "": none
    seed: int = 0
    fold: str | None = None  # K/N
    device: str | None = None
    error: str | None = None  # its first line; why it was skipped
    metrics: dict[str, float] = field(default_factory=dict)
    best: BestOfJob | None = None
    num_steps: int | None = None
    num_epochs: int | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_train: float | None = None
    run_id: str | None = None
    diverged: bool = False  # ended by an infinite or NaN loss
    curves: dict[str, MetricCurve] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        """Return the best value of a metric by which weights were kept, else the last one; None without one or if it is NaN."""
        best = self.best
        value = best.value if best is not None and best.metric == metric else self.metrics.get(metric)
        return None if value is None or math.isnan(value) else value

    def reached(self, metric: str, mode: str) -> float | None:
        """Return the value for a comparison: infinitely bad if it isn't finite or the training diverged; None without one."""
        value = self.value(metric)
        if value is not None and math.isfinite(value) and not self.diverged:
            return value
        is_bad = self.diverged or value is not None or metric in self.metrics
        return (math.inf if mode == "min" else -math.inf) if is_bad else None


def read_results(sweep: Sweep) -> list[JobResult]:
    """Return each job, by number. Reads each journal once: about 50 ms for 10,000 steps."""
    goals = {objective["metric"] for objective in sweep.objectives}
    most = max(MIN_POINTS, min(MAX_POINTS, MAX_POINTS_OF_ALL // max(1, len(sweep.jobs))))
    return [_read(sweep, sweep.jobs[number], goals, most) for number in sorted(sweep.jobs)]


def as_keys(overrides: tuple[str, ...]) -> dict[str, str]:
    r"""Return overrides by key without Hydra's signs: ("+optimizer.lr=0.1", "device=cuda\\:0") -> their plain values."""
    pairs = (text.partition("=") for text in overrides)
    return {key.lstrip("+~"): _plain(value) for key, _, value in pairs}


def differing_keys(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command line. results: Each one's values by key."""
    keys = dict.fromkeys(key for values in results for key in values)
    return [key for key in keys if len({values.get(key) for values in results}) > 1]


def find_goals(objectives: Sequence[dict[str, str]], results: Sequence[JobResult]) -> tuple[Goal, ...]:
    """Return a search's objectives, else the metric by which most jobs kept weights; () without any."""
    if objectives:
        return tuple(Goal(each["metric"], each["direction"][:3]) for each in objectives)
    kept = Counter((result.best.metric, result.best.mode) for result in results if result.best)
    return (Goal(*kept.most_common(1)[0][0]),) if kept else ()


def best_first(results: Sequence[JobResult], goals: Sequence[Goal]) -> list[JobResult]:
    """Sort by state as in RANK, then those on the Pareto front first, then by the goals, then by number."""
    front = find_front(results, goals)

    def key(result: JobResult) -> tuple[object, ...]:
        costs = _costs(result, goals)
        known = [math.inf if cost is None else cost for cost in costs]
        return (RANK.get(result.state, 2), result.job not in front, None in costs, known, result.job)

    return sorted(results, key=key)


def find_front(results: Sequence[JobResult], goals: Sequence[Goal]) -> set[int]:
    """Return the finished jobs that no other one beats, for two objectives or more. Quadratic in the jobs."""
    if len(goals) < 2:
        return set()
    costs = {result.job: _costs(result, goals) for result in results if result.state == "finished"}
    whole = {job: [value for value in cost if value is not None] for job, cost in costs.items() if None not in cost}

    def beats(one: list[float], other: list[float]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return {job for job, cost in whole.items() if not any(beats(other, cost) for other in whole.values())}


def _read(sweep: Sweep, job: Job, goals: set[str], most: int) -> JobResult:
    folder = sweep.folder_of(job) if job.folder_name else None
    stored = Summary.read(folder) if folder else Summary()
    summary: dict[str, Any] = vars(stored) if stored.has_ended or stored.metrics else {}  # else its numbers are unknown
    series = read_series(folder) if folder else {}
    best = _best(summary.get("best"))
    names = [LOSS, *sorted(goals | ({best.metric} if best else set()))]
    overrides = tuple(map(without_password, job.overrides))
    keys = as_keys(overrides)
    rerun = folder / "rerun.yaml" if folder is not None else None
    text = rerun.read_text(errors="replace") if rerun is not None and rerun.is_file() else ""
    seed, fold, num_folds = (_setting(key, keys, text) for key in ("seed", "data.fold", "data.num_folds"))
    error = job.error or summary.get("error")
    metrics = {name: math.nan if value is None else value for name, value in (summary.get("metrics") or {}).items()}
    return JobResult(
        job.number,
        job.name,
        overrides,
        keys,
        job.state,
        job.folder_name,
        int(seed) if seed.isdecimal() else 0,
        as_fold(fold, num_folds),
        device=summary.get("device") or job.device,
        error=str(error).strip().partition("\n")[0] if error else None,
        metrics=dict(sorted(_numbers(metrics).items())),
        best=best,
        diverged=summary.get("ending") == "not_finite",
        **{name: summary.get(name) for name in UNCHANGED},
        seconds_train=(summary.get("seconds") or {}).get("train"),
        curves={name: MetricCurve(*thin(series[name][0], series[name][2], most)) for name in names if name in series},
    )


def _setting(key: str, keys: dict[str, str], rerun: str) -> str:
    if keys.get(key, "")[:1].isdecimal():
        return keys[key]
    group, _, name = key.rpartition(".")
    before = rf"^{group}:\n(?:  .*\n)*?  " if group else "^"
    match = re.search(rf"{before}{name}: (\d[\d/]*)$", rerun, re.MULTILINE)
    return match[1] if match else ""


def as_fold(fold: str, num_folds: str) -> str | None:
    """Return data.fold and data.num_folds as K/N; None without folds."""
    pair = fold_of(fold, int(num_folds) if num_folds.isdecimal() else None) if fold[:1].isdecimal() else None
    return f"{pair[0]}/{pair[1]}" if pair else None


def _numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (values or {}).items() if isinstance(value, int | float)}


def _best(best: Mapping[str, Any] | None) -> BestOfJob | None:
    if not best or not best.get("metric"):
        return None
    metric = str(best["metric"])
    mode = best.get("mode") or ("max" if "acc" in metric else "min")
    return BestOfJob(metric, mode, best.get("value"), int(best.get("step") or 0))


def _plain(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return re.sub(r"\\(.)", r"\1", value)


def _costs(result: JobResult, goals: Sequence[Goal]) -> list[float | None]:
    values = [(goal.mode, result.value(goal.metric)) for goal in goals]
    signed = [value if value is None or mode == "min" else -value for mode, value in values]
    return [math.inf if value is not None and math.isinf(value) else value for value in signed]  # inf is always bad
