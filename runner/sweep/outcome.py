"""Writes into the sweep's journal which job is the best, its metrics, and the table: what its run in MLflow shows. For mlflow_parent.py."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from runner.config.validate import without_password
from runner.experiment.user_tags import NOTE as NOTE
from runner.sweep.report import number_format, tables
from runner.sweep.report.ranking import best_first
from runner.sweep.report.report import Report
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events, read_points

UNKNOWN = "unknown"  # MLflow was away when the sweep ended
MOST_ROWS = 20  # of the table there; report.html has all


def tell(journal: Journal, folder: Path, report: Report, *, run_id: str | None, note: str | None = None) -> None:
    """Appends what the sweep's journal does not say yet: a sweep that went on has another best, or the same one.

    MLflow shows the value of the highest step: that is how many jobs have finished, and another best has more of them.
    run_id: the best job's (None: MLflow has not got it).
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
    now = dict.fromkeys(before, math.nan) | metrics_of(report)  # what the last best had and this one has not
    if any(name not in before or not _is_same(before[name], value) for name, value in now.items()):
        values = [list(now.values())]
        journal.points(list(now), [report.counts["finished"]], [int(time.time() * 1000)], values)


def tags_of(report: Report, *, run_id: str | None) -> dict[str, str]:
    """The table, and which job is the best, and by what; of several goals the job that the table has first."""
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
    """How the sweep was asked for, in Markdown."""
    return f"A sweep: `python -m runner -m {' '.join(map(without_password, words))}`"


def note(report: Report) -> str:
    """The best job, the command, how many jobs ended how, and the table's first rows, in Markdown."""
    columns = tables.jobs(report) if report.results else {"job": []}
    rows = [[title.replace("|", "\\|") for title in columns], ["---"] * len(columns)]
    cells = [[cell.text.replace("|", "\\|") for cell in column[:MOST_ROWS]] for column in columns.values()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [*rows, *map(list, zip(*cells, strict=True))])
    more = len(report.results) - MOST_ROWS
    rest = f"{more:,} more jobs are" if more > 0 else "Curves and comparisons are"
    words = [command(report.overrides), number_format.counts(report), table, f"{rest} in report.html, an artifact."]
    if report.best is not None:
        said = ", ".join(
            f"{goal.metric} {number_format.value(report.best.value(goal.metric))}" for goal in report.goals
        )
        words.insert(0, f"**The best job is {report.best.job}, {report.best.name}**: {said}")
    return "\n\n".join(words)


def metrics_of(report: Report) -> dict[str, float]:
    """The best job's last ones under their own names; best/GOAL is the best of any job, also where it came earlier."""
    if report.best is None:
        return {}
    firsts = [(goal.metric, best_first(report.results, (goal,))[0]) for goal in report.goals]
    bests = {f"best/{metric}": first.value(metric) for metric, first in firsts}
    front = {"best/pareto_front": float(len(report.front))} if report.front else {}
    return report.best.metrics | {name: value for name, value in bests.items() if value is not None} | front


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
