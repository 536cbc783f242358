"""The report's tables as columns of cells, and its numbers as text: on the page, in MLflow, and printed in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.experiment.terminal import readable, seconds
from runner.sweep.jobs.ledger import DEFAULTS
from runner.sweep.report.report import Comparison, Mean, Report
from runner.sweep.report.results import JobResult

#: columns of text; all others have numbers
WORDS = ("jobs", "compared with the best", "name", "state", "device", "cause", "where to look")
NAME = 50  # a name up to this length stays in one line, and other columns leave for it
MAX_NAME = 200
MAX_ERROR = 600  # an error ends with its help
NO_REASON = "it left no reason"
COLORS = {"finished": "green", "pruned": "dim", "skipped": "yellow", "failed": "red", "killed": "red"}


class Cell(NamedTuple):
    """A text, and the value by which its column is sorted (None: always last)."""

    text: str
    value: Any = None


Columns = dict[str, list[Cell]]


def jobs(report: Report) -> Columns:
    """Return all jobs, best first, without empty columns."""
    results = report.results
    goals = [goal.metric for goal in report.goals]
    tests = sorted({name for result in results for name in result.metrics if name.startswith("test/")} - set(goals))
    kept = [each.best if each.best and each.best.value is not None else None for each in results]
    trained = [each if each.num_steps else None for each in results]
    columns = {
        "job": [Cell(f"{'*' * (each.job in report.front)}{each.job}", each.job) for each in results],
        **{title: _cells(str, [getattr(each, title) for each in results]) for title in ("name", "state", "device")},
        **{name: _cells(value, [each.value(name) for each in results]) for name in goals},
        "step": _cells("{:,}".format, [best and best.step for best in kept]),
        **{name: _cells(value, [each.metrics.get(name) for each in results]) for name in tests},
        "steps/s": _cells(speed, [each and each.steps_per_second for each in trained]),
        "samples/s": _cells(speed, [each and each.samples_per_second for each in trained]),
        "trained": _cells(seconds, [each and each.seconds_train for each in trained]),
    }
    return {title: cells for title, cells in columns.items() if any(cell.text for cell in cells)}


def seeds(report: Report) -> Columns:
    """Return the mean ± the sample's standard deviation of each group."""
    metrics = dict.fromkeys(name for group in report.seeds for name in group.means)
    verdicts = {each.b: _verdict(each) for each in report.comparisons}
    if report.winner:
        verdicts[report.winner] = "better"
    compared = _cells(str, [verdicts.get(group.name) for group in report.seeds])
    return {
        "jobs": _cells(str, [group.name for group in report.seeds]),
        "n": _cells(str, [len(group.jobs) for group in report.seeds]),
        **({"compared with the best": compared} if verdicts else {}),
        **{name: _cells(mean, [group.means.get(name) for group in report.seeds]) for name in metrics},
    }


def _verdict(comparison: Comparison) -> str:
    if comparison.difference.is_decided:
        return "worse" if comparison.verdict == "better" else "better"
    more, unit = comparison.difference.more_seeds, comparison.unit
    return f"undecided: ~{more} {unit if more > 1 else unit[:-1]}" if more else "undecided"


def causes(results: Sequence[JobResult]) -> Columns:
    """Return why jobs failed or were skipped, and where to look."""
    return {
        "job": _cells(str, [each.job for each in results]),
        "name": _cells(str, [each.name for each in results]),
        "state": _cells(str, [each.state for each in results]),
        "cause": _cells(str, [each.error or NO_REASON for each in results]),
        "where to look": _cells(str, map(_log, results)),
    }


def _log(result: JobResult) -> str | None:
    return f"{result.folder}/console.log" if result.folder and result.state != "skipped" else None


def value(number: float | None) -> str:
    """Return a metric's value; empty for None."""
    return "" if number is None else readable(number)


def mean(each: Mean | None) -> str:
    """Return the mean and, for several values, the sample's standard deviation; over folds the interval."""
    if each is None:
        return ""
    if each.low is not None:
        return f"{value(each.mean)} ({value(each.low)} to {value(each.high)})"
    return value(each.mean) + (f" ± {value(each.std)}" if each.std is not None else "")


def speed(per_second: float | None) -> str:
    if per_second is None:
        return ""
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.2g}"


def counts(report: Report) -> str:
    """Return `12 jobs: 10 finished, 1 skipped, 1 failed`."""
    total = len(report.results)
    parts = ", ".join(f"{number} {state}" for state, number in report.counts.items())
    return f"{total} job{'' if total == 1 else 's'}" + (f": {parts}" if parts else "")


def _cells(show: Callable[[Any], str], values: Iterable[Any]) -> list[Cell]:
    return [Cell("" if value is None else show(value), value) for value in values]


def show(report: Report, console: Console) -> None:
    """Print the jobs, best first, then the tables of seeds, failures and skipped jobs."""
    _print(console, counts(report))
    if report.results:
        console.print(_jobs_table(report, console.width), soft_wrap=False)
    if report.front:
        _print(console, "* on the Pareto front: no other job is better in everything")
    if report.seeds:
        _print(console, f"\nover {report.over}, mean {'(95 % interval)' if 'folds' in report.over else '± std'}")
        columns = _texts(seeds(report))
        winner = [group.name for group in report.seeds].index(report.winner) if report.winner else None
        may_leave = list(columns)[: (4 if report.comparisons else 3) - 1 : -1]
        console.print(_table(_fit(columns, "jobs", may_leave, console.width), bold=winner), soft_wrap=False)
    for title, results in (("failures", report.failures), ("skipped", report.skipped)):
        if results:
            _print(console, f"\n{title}")
            console.print(_causes_table(results), soft_wrap=False)


def _jobs_table(report: Report, width: int) -> Table:
    columns = _texts(jobs(report))
    if "name" in columns:
        columns["name"] = [name or DEFAULTS for name in columns["name"]]
    if "device" in report.keys:
        columns.pop("device", None)  # in the names already
    tests = [title for title in columns if title.startswith("test/")]
    # the first one leaves first; the page and report.csv have all columns
    may_leave = ["steps/s", "trained", "device", *tests[:0:-1], "samples/s", "state", "step", *tests[:1]]
    shown = _fit(columns, "name", may_leave, width)
    if "state" not in shown and "state" in columns and "name" in shown:
        states = [f" ({state})" if state != "finished" else "" for state in columns["state"]]
        shown["name"] = [name + state for name, state in zip(shown["name"], states, strict=True)]
    # with several seeds, the first job is the luckiest one, not a winner
    return _table(shown, bold=report.results.index(report.best) if report.best and not report.seeds else None)


def _fit(columns: dict[str, list[str]], name: str, may_leave: Sequence[str], width: int) -> dict[str, list[str]]:
    left = dict(columns)
    room = width - min(NAME, max(map(len, columns.get(name, ())), default=0))
    for title in may_leave:
        if sum(max(map(len, (head, *cells))) + 2 for head, cells in left.items() if head != name) <= room:
            break
        left.pop(title, None)
    return left


def _table(columns: dict[str, list[str]], *, bold: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        is_word = title in WORDS
        table.add_column(Text(title), justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word)
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        style = "bold" if number == bold else ""
        pairs = zip(columns, cells, strict=True)
        table.add_row(*(Text(cell, style=COLORS.get(cell, "") if title == "state" else style) for title, cell in pairs))
    return table


def _causes_table(results: Sequence[JobResult]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for share in (None, 2, 3):
        table.add_column(overflow="fold", ratio=share)
    alike: dict[str, list[JobResult]] = {}
    for result in results:
        alike.setdefault(result.error or NO_REASON, []).append(result)
    for error, (result, *others) in alike.items():
        name = _cut(result.name)
        if others:
            name += f"; likewise {_cut(', '.join(str(other.job) for other in others))}"
        log = Text(f"  {path}", style="dim") if (path := _log(result)) else ""
        table.add_row(str(result.job), Text(name), Text.assemble(_cut(error, MAX_ERROR), log))
    return table


def _texts(columns: Columns) -> dict[str, list[str]]:
    return {title: [_cut(cell.text) for cell in cells] for title, cells in columns.items()}


def _cut(text: str, most: int = MAX_NAME) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
