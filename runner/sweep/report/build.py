"""Makes a sweep's report from its folder, and writes report.json, report.csv and report.html there: at the sweep's end, and for `report`.

The order is that of the modules here: results, ranking, seeds, comparisons, report, then its files.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import datetime
import io
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.validate import without_password
from runner.errors import finite, harmless
from runner.sweep.jobs import ledger
from runner.sweep.report import figures, number_format, tables
from runner.sweep.report.comparisons import against_best, as_values, num_looks
from runner.sweep.report.ranking import best_first, find_front, find_goals
from runner.sweep.report.report import Report
from runner.sweep.report.results import Result, read_results
from runner.sweep.report.seeds import configurations, over_seeds
from runner.tasks.metric_names import PLOTS

MOST_PICTURE_BYTES, MOST_PICTURES_BYTES = 400_000, 1_500_000
PNG = b"\x89PNG\r\n\x1a\n"


class Card(NamedTuple):
    """What one wants to know first, large."""

    label: str
    number: str
    note: str
    name: str = ""
    kind: str = ""


def draw(report: Report) -> str:
    """The whole page, about 5 MB, of which plotly.js is 4.8; every text of a person's is escaped. A second."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # heavy, as the next two
    from plotly.offline import get_plotlyjs
    from plotly.utils import PlotlyJSONEncoder

    curves, search, parallel = figures.draw_curves(report), figures.draw_search(report), figures.draw_parallel(report)
    importance = figures.draw_importance(report)
    drawn = [*curves, *search, *parallel, *importance]
    plots = [{"id": f"plot-{each.name}", **each.plot.to_plotly_json()} for each in drawn]
    own = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(own),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        report=report,
        title=f"sweep {report.folder.resolve().parent.name}/{report.folder.resolve().name}",
        began=datetime.datetime.fromtimestamp(report.began_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cards=[_best_card(report), *_other_cards(report)],
        tables=tables,
        zip=zip,
        number_format=number_format,
        curves=curves,
        search=[*search, *importance, *parallel] if report.objectives and search else [],
        keys=[] if search else parallel,
        with_curves=figures.with_curves(report),
        colors=figures.job_colors(report),
        pictures=pictures(report),
        time=picture_of_time(report),
        # "<" never stands in it: no text of a person's can end the script it is in
        data=json.dumps(plots, cls=PlotlyJSONEncoder).replace("<", "\\u003c"),
        plotly_js=get_plotlyjs() if drawn else "",
        css=(own / "page.css").read_text(),
        js=(own / "page.js").read_text(),
    )


def pictures(report: Report) -> list[tuple[str, str]]:
    """Name and content of the best job's pictures, about 50 KB each, in the order of runner.tasks.metric_names."""
    if report.best is None or not report.best.folder:
        return []
    found, left = [], MOST_PICTURES_BYTES
    for name in dict.fromkeys(name for kind in PLOTS.values() for name in kind):
        path = report.folder / report.best.folder / "plots" / f"{name}.png"
        content = path.read_bytes() if path.is_file() and path.stat().st_size <= min(MOST_PICTURE_BYTES, left) else b""
        if content.startswith(PNG):
            left -= len(content)
            found.append((name, base64.b64encode(content).decode()))
    return found


def picture_of_time(report: Report) -> str:
    """Where the time of all jobs went, as a run's plots/time.png; "" where none has told. Some 0.1 s, and matplotlib."""
    timed = sorted((result for result in report.results if result.time), key=lambda result: result.job)
    if not timed:
        return ""
    from runner.experiment.plots.curves import AROUND, COLORS, draw_time  # heavy

    spent: Counter[str] = Counter()
    for result in timed:
        spent.update({name: value for name, value in result.time.items() if name in AROUND or name in COLORS})
    with tempfile.TemporaryDirectory() as folder:
        drawn = draw_time(spent, Path(folder), title="all jobs, as if one after the other", num_runs=len(timed))
        return base64.b64encode(drawn[0].read_bytes()).decode() if drawn else ""


def _best_card(report: Report) -> Card:
    best = report.best
    if best is None:
        return Card("best job", "none", "No job finished with a value.")
    goal = report.goals[0]
    parts = [f"job {best.job}", best.device]
    if best.best is not None and best.best.metric == goal.metric:
        parts += [f"step {best.best.step:,}", f"epoch {best.best.epoch}" if best.best.epoch else None]
        parts.append(f"after {number_format.seconds(best.best.seconds)}" if best.best.seconds is not None else None)
    title = "best job" if len(report.goals) < 2 else f"best of {len(report.front)} on the Pareto front"
    number = number_format.value(best.value(goal.metric))
    return Card(f"{title}, {goal.metric}", number, " · ".join(filter(None, parts)), best.name, "best")


def _other_cards(report: Report) -> list[Card]:
    cards = []
    if report.seeds and report.goals:
        best, goal = report.comparisons[0].a if report.comparisons else "", report.goals[0].metric
        group = next((each for each in report.seeds if each.name == best), report.seeds[0])
        if goal in group.means:
            decided = (
                f", {'better than each other one' if report.winner else 'not decided'}" if report.comparisons else ""
            )
            name = f"{group.name}, n = {group.means[goal].n}{decided}"
            what = "best mean (95 %)" if "folds" in report.over else "best mean ± std"
            cards.append(Card(f"{goal}, {what} over {report.over}", number_format.mean(group.means[goal]), name))
    return cards


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


FILE = "optuna.db"  # in a sweep's folder
#: with fewer whole trials the shares are noise
LEAST_TRIALS = 11


def read_importance(folder: Path) -> dict[str, float]:
    """Shares of the first objective's variance by key, the largest first; they sum to 1. Imports Optuna: a second.

    {} without a study that can be read, without Optuna, with fewer than LEAST_TRIALS whole trials, or where no value
    differs: the report stands without it.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        import optuna  # heavy and optional
        import sqlalchemy
    except ImportError:
        return {}
    storage = None
    try:
        storage = optuna.storages.RDBStorage(str(sqlalchemy.URL.create("sqlite", database=str(path))))
        return _shares(storage)
    except (ValueError, RuntimeError, optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError):
        return {}
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()


def _shares(storage: Any) -> dict[str, float]:
    """Raises: ValueError or RuntimeError when no key is in every trial, or all of them reached the same value."""
    import optuna

    studies = storage.get_all_studies()
    if not studies:
        return {}
    study = optuna.load_study(study_name=studies[0].study_name, storage=storage)
    whole = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(whole) < LEAST_TRIALS:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)  # the same folder gives the same report
    found = optuna.importance.get_param_importances(study, evaluator=evaluator, target=lambda trial: trial.values[0])
    return {key: float(share) for key, share in found.items()}


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
        "report.json": as_json(report),
        "report.csv": as_csv(report),
        "report.html": draw(report),
    }
    for name, text in texts.items():
        beside = folder / f".{name}.{os.getpid()}"
        beside.write_text(text, encoding="utf-8", newline="")
        beside.replace(folder / name)
    return report
