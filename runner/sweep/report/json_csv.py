"""report.json and report.csv: the report for programs; the curves are not in them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

from runner.errors import finite, harmless
from runner.sweep.report.comparisons import as_values
from runner.sweep.report.report import Report
from runner.sweep.report.results import Result

FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def as_json(report: Report) -> str:
    """Everything but the curves; what JSON has no number for (NaN, inf) is null."""
    whole = {
        "uid": report.uid,
        "command": report.command,
        "overrides": report.overrides,
        "began_ms": report.began_ms,
        "exit_code": report.exit_code,
        "counts": report.counts,
        "objectives": report.objectives,
        "goals": [dataclasses.asdict(goal) for goal in report.goals],
        "keys": report.keys,
        "best_job": report.best.job if report.best else None,
        "pareto_front": report.front,
        "jobs": [_job(result) for result in report.results],
        "seeds": [dataclasses.asdict(group) for group in report.seeds],
        "comparisons": [as_values(each) for each in report.comparisons],
        "winner": report.winner,
        "importance": report.importance,
        "failures": [_cause(result) for result in report.failures],
        "skipped": [_cause(result) for result in report.skipped],
    }
    return json.dumps(finite(whole), indent=1) + "\n"


def as_csv(report: Report) -> str:
    """One line a job, best first; one column for each key that sets jobs apart and for each metric."""
    metrics = sorted({name for result in report.results for name in result.metrics})
    lines = [_line(result, report, metrics) for result in report.results] or [{"job": ""}]
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    table.writerow({name: _cell(name) for name in table.fieldnames})
    table.writerows({name: _cell(value) for name, value in line.items()} for line in lines if report.results)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula begins with an apostrophe; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    is_formula = value.startswith(FORMULAS) and not _is_number(value)
    return ("'" if is_formula else "") + harmless(value)  # a carriage return would begin another line


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _line(result: Result, report: Report, metrics: list[str]) -> dict[str, Any]:
    best = result.best
    head = {"job": result.job, "name": result.name, "state": result.state, "device": result.device}
    keys = {key: result.keys.get(key) for key in report.keys if key not in head}
    return {
        **head,
        **keys,
        "best_metric": best.metric if best else None,
        "best_value": best.value if best else None,
        "best_step": best.step if best else None,
        "seconds_to_best": best.seconds if best else None,
        **{name: result.metrics.get(name) for name in metrics},
        "num_steps": result.num_steps,
        "num_epochs": result.num_epochs,
        "steps_per_second": result.steps_per_second,
        "samples_per_second": result.samples_per_second,
        "seconds_train": result.seconds_train,
        "run_id": result.run_id,
        "folder": result.folder,
        "error": result.error,
    }


def _job(result: Result) -> dict[str, Any]:
    shown = (field.name for field in dataclasses.fields(result) if field.name != "curves")
    values = {name: getattr(result, name) for name in shown}
    return {**values, "best": dataclasses.asdict(result.best) if result.best else None}


def _cause(result: Result) -> dict[str, Any]:
    log = f"{result.folder}/console.log" if result.folder else None
    return {"job": result.job, "name": result.name, "state": result.state, "error": result.error, "log": log}
