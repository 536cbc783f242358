"""Makes a sweep's report from its folder, and writes report.json, report.csv and report.html there: at the sweep's end, and for `report`.

The order is that of the modules here: results, ranking, seeds, comparisons, report, then its files.
"""

from __future__ import annotations

import os
from pathlib import Path

from runner.config.validate import without_password
from runner.sweep.jobs import ledger
from runner.sweep.report import json_csv, page
from runner.sweep.report.comparisons import against_best, num_looks
from runner.sweep.report.importance import read_importance
from runner.sweep.report.ranking import best_first, find_front, find_goals
from runner.sweep.report.report import Report
from runner.sweep.report.results import read_results
from runner.sweep.report.seeds import configurations, over_seeds

__all__ = ["Report", "read_report", "write"]


def read_report(folder: Path) -> Report:
    """Reads the ledger, each job's summary.json and journal: 100 jobs of 10,000 steps take seconds.

    Raises: RunnerError when the folder holds no sweep.
    """
    sweep = ledger.read(folder)
    results = read_results(sweep)
    goals = find_goals(sweep.objectives, results)
    seeds = over_seeds(results, goals)
    groups = configurations(results)
    comparisons = against_best(groups, goals[0], num_looks=num_looks(sweep.max_seeds)) if seeds and goals else []
    return Report(
        folder,
        sweep.uid,
        sweep.began_ms,
        tuple(map(without_password, sweep.overrides)),
        sweep.objectives,
        goals,
        best_first(results, goals),
        tuple(sorted(find_front(results, goals))),
        seeds,
        comparisons,
        read_importance(folder) if sweep.objectives else {},
    )


def write(folder: Path) -> Report:
    """The report, and its three files in the folder; each is the old one or the new one at any time, never a half."""
    report = read_report(folder)
    texts = {
        "report.json": json_csv.as_json(report),
        "report.csv": json_csv.as_csv(report),
        "report.html": page.draw(report),
    }
    for name, text in texts.items():
        beside = folder / f".{name}.{os.getpid()}"
        beside.write_text(text, encoding="utf-8", newline="")
        beside.replace(folder / name)
    return report
