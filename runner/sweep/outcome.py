"""Write the best job, its metrics and the table to the sweep's journal, for its run in MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from runner.errors import without_password
from runner.experiment.provenance import NOTE as NOTE
from runner.sweep.report import tables
from runner.sweep.report.report import Report
from runner.sweep.report.results import best_first
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events, read_points

UNKNOWN = "unknown"  # MLflow did not answer at the end of the sweep
MOST_ROWS = 20  # of the table in MLflow; report.html has all


def tell(journal: Journal, folder: Path, report: Report, *, run_id: str | None, note: str | None = None) -> None:
    """Append what the sweep's journal does not have yet, as a resumed sweep may have another best job.

    The step of its metrics is the number of finished jobs, as MLflow shows the value of the highest step.

    Args:
        run_id: Of the best job (None: MLflow does not have it).
    """
    said: dict[str, str] = {}
    for event in read_events(folder):
        said |= event.get("tags") or {}
    tags = tags_of(report, run_id=run_id) | ({} if note is None else {NOTE: note})
    if any(said.get(name) != value for name, value in tags.items()):
        journal.event("tags", tags=tags)
    if report.best is None:
        return
    before = {name: points[-1][1] for name, points in read_points(folder).items()}
    now = dict.fromkeys(before, math.nan) | metrics_of(report)  # NaN for metrics of only the former best job
    if any(name not in before or not _is_same(before[name], value) for name, value in now.items()):
        values = [list(now.values())]
        journal.points(list(now), [report.counts["finished"]], [int(time.time() * 1000)], values)


def tags_of(report: Report, *, run_id: str | None) -> dict[str, str]:
    """Return tags with the table, the best job and its metric; for several objectives the table's first job."""
    if report.best is None:
        return {NOTE: note(report)}
    return {
        NOTE: note(report),
        "best_job": str(report.best.job),
        "best_job_name": report.best.name,
        "best_job_run_id": run_id or UNKNOWN,
        "goals": ", ".join(f"{goal.mode} {goal.metric}" for goal in report.goals),
    }


def command(words: Iterable[str]) -> str:
    """Return the command of the sweep in Markdown."""
    return f"A sweep: `python -m runner -m {' '.join(map(without_password, words))}`"


def note(report: Report) -> str:
    """Return the best job, the command, the number of jobs by state, and the table's first rows in Markdown."""
    columns = tables.jobs(report) if report.results else {"job": []}
    rows = [[title.replace("|", "\\|") for title in columns], ["---"] * len(columns)]
    cells = [[cell.text.replace("|", "\\|") for cell in column[:MOST_ROWS]] for column in columns.values()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [*rows, *map(list, zip(*cells, strict=True))])
    more = len(report.results) - MOST_ROWS
    rest = f"{more:,} more jobs are" if more > 0 else "Curves and comparisons are"
    words = [command(report.overrides), tables.counts(report), table, f"{rest} in report.html, an artifact."]
    if report.best is not None:
        said = ", ".join(f"{goal.metric} {tables.value(report.best.value(goal.metric))}" for goal in report.goals)
        words.insert(0, f"**The best job is {report.best.job}, {report.best.name}**: {said}")
    return "\n\n".join(words)


def metrics_of(report: Report) -> dict[str, float]:
    """Return the best job's last metrics; best/METRIC is the best value of any job at any step."""
    if report.best is None:
        return {}
    firsts = [(goal.metric, best_first(report.results, (goal,))[0]) for goal in report.goals]
    bests = {f"best/{metric}": first.value(metric) for metric, first in firsts}
    front = {"best/pareto_front": float(len(report.front))} if report.front else {}
    return report.best.metrics | {name: value for name, value in bests.items() if value is not None} | front


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
