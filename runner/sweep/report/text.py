"""`report`: print a sweep's tables in 80 columns, also through a pipe, and write its files again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.config.trust import check_folder
from runner.errors import RunnerError
from runner.experiment.terminal import Terminal
from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import DEFAULTS
from runner.sweep.report import build, tables
from runner.sweep.report.report import Report
from runner.sweep.report.results import JobResult

ROOT = Path("multirun")
NAME = 50  # a name up to this length stays in one line, and other columns leave for it
MOST_NAME = 200
MOST_ERROR = 600  # an error ends with its help
COLORS = {"finished": "green", "pruned": "dim", "skipped": "yellow", "failed": "red", "killed": "red"}


def rewrite(folder: Path | None) -> Path:
    """Print a sweep's tables, write its files again, and return its folder (None: the last sweep below multirun/)."""
    found = folder if folder is not None else ledger.find_last(ROOT)
    if found is None:
        problem = f"there is no sweep in {ROOT.absolute()}"
        fix = "run `python -m runner -m KEY=VALUE1,VALUE2`, or name a sweep's directory"
        raise RunnerError.of("report", problem, fix)
    check_folder(found)
    console = Terminal()
    show(build.write(found), console)
    console.print(f"report  {found / 'report.html'}", markup=False)
    return found


def show(report: Report, console: Console) -> None:
    """Print the jobs, best first, then the tables of seeds, failures and skipped jobs."""
    _say(console, tables.counts(report))
    if report.results:
        _table(console, _jobs(report, console.width))
    if report.front:
        _say(console, "* on the Pareto front: no other job is better in everything")
    if report.seeds:
        _say(console, f"\nover {report.over}, mean {'(95 % interval)' if 'folds' in report.over else '± std'}")
        _table(console, _seeds(report, console.width))
    for title, results in (("failures", report.failures), ("skipped", report.skipped)):
        if results:
            _say(console, f"\n{title}")
            _table(console, _causes(results))


def _jobs(report: Report, width: int) -> Table:
    columns = _texts(tables.jobs(report))
    if "name" in columns:
        columns["name"] = [name or DEFAULTS for name in columns["name"]]
    if "device" in report.keys:
        columns.pop("device", None)  # in the names already
    tests = [title for title in columns if title.startswith("test/")]
    # the first one leaves first; the page and report.csv have all columns
    may_leave = ["steps/s", "epoch", "trained", "device", *tests[:0:-1], "samples/s", "state", "step", *tests[:1]]
    shown = _fit(columns, "name", may_leave, width)
    if "state" not in shown and "state" in columns and "name" in shown:
        states = [f" ({state})" if state != "finished" else "" for state in columns["state"]]
        shown["name"] = [name + state for name, state in zip(shown["name"], states, strict=True)]
    # with several seeds, the first job is the luckiest one, not a winner
    best = report.results.index(report.best) if report.best and not report.seeds else None
    return _filled(shown, bold=best)


def _fit(columns: dict[str, list[str]], name: str, may_leave: Sequence[str], width: int) -> dict[str, list[str]]:
    left = dict(columns)
    wanted = min(NAME, max(map(len, columns.get(name, ())), default=0))
    for title in may_leave:
        taken = sum(max(map(len, (head, *cells))) + 2 for head, cells in left.items() if head != name)
        if taken + wanted <= width:
            break
        left.pop(title, None)
    return left


def _filled(columns: dict[str, list[str]], *, bold: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        is_word = title in tables.WORDS
        table.add_column(Text(title), justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word)
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        style = "bold" if number == bold else ""
        pairs = zip(columns, cells, strict=True)
        table.add_row(*(Text(cell, style=COLORS.get(cell, "") if title == "state" else style) for title, cell in pairs))
    return table


def _seeds(report: Report, width: int) -> Table:
    columns = _texts(tables.seeds(report))
    winner = [group.name for group in report.seeds].index(report.winner) if report.winner else None
    stay = 4 if report.comparisons else 3
    return _filled(_fit(columns, "jobs", list(columns)[: stay - 1 : -1], width), bold=winner)


def _causes(results: Sequence[JobResult]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for share in (None, 2, 3):
        table.add_column(overflow="fold", ratio=share)
    alike: dict[str, list[JobResult]] = {}
    for result in results:
        alike.setdefault(result.error or "it left no reason", []).append(result)
    for error, (result, *others) in alike.items():
        log = Text(f"  {result.folder}/console.log", style="dim") if result.folder and result.state != "skipped" else ""
        name = _cut(result.name)
        if others:
            name += f"; likewise {_cut(', '.join(str(other.job) for other in others))}"
        table.add_row(str(result.job), Text(name), Text.assemble(_cut(error, MOST_ERROR), log))
    return table


def _texts(columns: tables.Columns) -> dict[str, list[str]]:
    return {title: [_cut(cell.text) for cell in cells] for title, cells in columns.items()}


def _cut(text: str, most: int = MOST_NAME) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _table(console: Console, table: Table) -> None:
    console.print(table, soft_wrap=False)
