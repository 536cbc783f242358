"""Write a sweep's report.json, report.csv and report.html: at the end of the sweep, and for `report`."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import os
from pathlib import Path
from typing import Any

from runner.config.trust import check_folder
from runner.errors import RunnerError, finite, harmless
from runner.experiment.terminal import Terminal
from runner.sweep.jobs import ledger
from runner.sweep.report import figures, tables
from runner.sweep.report.report import Report, as_values, read_report
from runner.sweep.report.results import JobResult

ROOT = Path("multirun")
#: columns of report.csv
JOB_COLUMNS = ("job", "name", "state", "device")
RESULT_COLUMNS = (
    "num_steps",
    "num_epochs",
    "steps_per_second",
    "samples_per_second",
    "seconds_train",
    "run_id",
    "folder",
)
FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def rewrite(folder: Path | None) -> Path:
    """Print a sweep's tables, write its files again, and return its folder (None: the last sweep below multirun/)."""
    folder = folder if folder is not None else ledger.find_last(ROOT)
    if folder is None:
        problem = f"there is no sweep in {ROOT.absolute()}"
        fix = "run `python -m runner -m KEY=VALUE1,VALUE2`, or name a sweep's directory"
        raise RunnerError.of("report", problem, fix)
    check_folder(folder)
    console = Terminal()
    tables.show(write(folder), console)
    console.print(f"report  {folder / 'report.html'}", markup=False)
    return folder


def write(folder: Path) -> Report:
    """Write the three files to a sweep directory, each atomically."""
    report = read_report(folder)
    texts = {"report.json": as_json(report), "report.csv": as_csv(report), "report.html": draw(report)}
    for name, text in texts.items():
        unfinished = folder / f".{name}.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(folder / name)
    return report


def draw(report: Report) -> str:
    """Return the page, about 5 MB with 4.8 MB of plotly.js; every string of a user is escaped. Takes a second."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # heavy, as the next two
    from plotly.offline import get_plotlyjs
    from plotly.utils import PlotlyJSONEncoder

    sections = figures.draw(report)
    plots = [
        {"id": f"plot-{each.name}", **each.plot.to_plotly_json()} for section in sections.values() for each in section
    ]
    own = Path(__file__).parent
    options: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(own), autoescape=True, keep_trailing_newline=True, **options)
    return environment.get_template("page.html").render(
        report=report,
        title=f"sweep {report.folder.resolve().parent.name}/{report.folder.resolve().name}",
        began=datetime.datetime.fromtimestamp(report.began_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cards=_cards(report),
        tables=tables,
        zip=zip,
        sections=sections,
        with_curves=figures.with_curves(report),
        colors=figures.job_colors(report),
        # without "<" no text in it can end the script that holds it
        data=json.dumps(plots, cls=PlotlyJSONEncoder).replace("<", "\\u003c"),
        plotly_js=get_plotlyjs() if plots else "",
        css=(own / "page.css").read_text(),
        js=(own / "page.js").read_text(),
    )


def _cards(report: Report) -> list[dict[str, str]]:
    best = report.best
    if best is None:
        return [{"label": "best job", "number": "none", "name": "", "note": "No job finished with a value."}]
    goal = report.goals[0].metric
    note = [f"job {best.job}", best.device]
    if (kept := best.best) is not None and kept.metric == goal:
        note.append(f"step {kept.step:,}")
    label = f"best of {len(report.front)} on the Pareto front" if report.front else "best job"
    number, words = tables.value(best.value(goal)), " · ".join(filter(None, note))
    cards = [{"label": f"{label}, {goal}", "number": number, "name": best.name, "note": words}]
    group = next((each for each in report.seeds if each.name == report.best_group and goal in each.means), None)
    if group is not None:
        decided = ", better than each other one" if report.winner else ", not decided" if report.comparisons else ""
        label = f"{goal}, best mean {'(95 %)' if 'folds' in report.over else '± std'} over {report.over}"
        words = f"n = {group.means[goal].n}{decided}"
        cards.append({"label": label, "number": tables.mean(group.means[goal]), "name": group.name, "note": words})
    return cards


def as_json(report: Report) -> str:
    """Return all but the curves; numbers that JSON lacks (NaN, inf) are null."""
    head = ("uid", "command", "overrides", "began_ms", "exit_code", "counts", "objectives")
    whole = {
        **{name: getattr(report, name) for name in head},
        "goals": [dataclasses.asdict(goal) for goal in report.goals],
        "keys": report.keys,
        "best_job": report.best.job if report.best else None,
        "pareto_front": report.front,
        "jobs": [_without_curves(result) for result in report.results],
        "seeds": [dataclasses.asdict(group) for group in report.seeds],
        "comparisons": [as_values(each) for each in report.comparisons],
        "winner": report.winner,
        "failures": [_cause(result) for result in report.failures],
        "skipped": [_cause(result) for result in report.skipped],
    }
    return json.dumps(finite(whole), indent=1) + "\n"


def _without_curves(result: JobResult) -> dict[str, Any]:
    values = dataclasses.asdict(dataclasses.replace(result, curves={}))
    del values["curves"]
    return values


def _cause(result: JobResult) -> dict[str, Any]:
    log = f"{result.folder}/console.log" if result.folder else None
    return {"job": result.job, "name": result.name, "state": result.state, "error": result.error, "log": log}


def as_csv(report: Report) -> str:
    """Return a line per job, best first, with a column for each key that differs and each metric."""
    metrics = sorted({name for result in report.results for name in result.metrics})
    lines = [_line(result, report, metrics) for result in report.results]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(map(_cell, lines[0] if lines else ("job",)))
    table.writerows(map(_cell, line.values()) for line in lines)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = harmless(value)  # a carriage return would start another line
    try:
        float(value)
    except ValueError:  # an apostrophe prevents a formula in a spreadsheet
        return f"'{text}" if value.startswith(FORMULAS) else text
    return text


def _line(result: JobResult, report: Report, metrics: list[str]) -> dict[str, Any]:
    best = result.best
    return {
        **{name: getattr(result, name) for name in JOB_COLUMNS},
        **{key: result.keys.get(key) for key in report.keys if key not in JOB_COLUMNS},
        "best_metric": best and best.metric,
        "best_value": best and best.value,
        "best_step": best and best.step,
        **{name: result.metrics.get(name) for name in metrics},
        **{name: getattr(result, name) for name in (*RESULT_COLUMNS, "error")},
    }
