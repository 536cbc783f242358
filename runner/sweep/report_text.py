"""A report goes in; what a person reads in the terminal comes out: tables that fit 80 columns, also through a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.sweep import wording
from runner.sweep.findings import Report
from runner.sweep.results import Result

LEAST_NAME = 24  # columns that the name keeps, whatever stands beside it
#: what leaves a narrow terminal, the first one first; the page and report.csv have them all
MAY_LEAVE = ("steps/s", "epoch", "trained", "device", "samples/s", "step", "state")
COLORS = {"finished": "green", "pruned": "dim", "skipped": "yellow", "failed": "red", "killed": "red"}


def show(report: Report, console: Console) -> None:
    """Prints the jobs, best first, and the tables over seeds and devices, the failures and the skipped ones."""
    _say(console, wording.counts(report))
    if report.results:
        _table(console, _jobs(report, console.width))
    if report.front:
        _say(console, "* on the Pareto front: no other job is better in everything")
    if report.importance:
        shares = ", ".join(f"{key} {share:.2f}" for key, share in list(report.importance.items())[:6])
        _say(console, f"\nwhat mattered: {shares}")
    if report.seeds:
        _say(console, "\nover seeds, mean ± std")
        _table(console, _seeds(report))
    if report.devices:
        _say(console, "\nover devices")
        _table(console, _devices(report))
        for gain in report.gains:
            _say(console, wording.gain(gain))
    for title, results in (("failures", report.failures), ("skipped", report.skipped)):
        if results:
            _say(console, f"\n{title}")
            _table(console, _causes(results))


def _jobs(report: Report, width: int) -> Table:
    columns = _job_columns(report)
    wanted = max(len(result.name) for result in report.results)
    for name in MAY_LEAVE:
        taken = sum(max(map(len, (title, *cells))) + 2 for title, cells in columns.items() if title != "name")
        if taken + min(wanted, LEAST_NAME if name in ("step", "state") else 40) <= width:
            break
        columns.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        is_text = title in ("name", "state", "device")
        table.add_column(Text(title), justify="left" if is_text else "right", overflow="fold", no_wrap=title != "name")
    for result, cells in zip(report.results, zip(*columns.values(), strict=True), strict=True):
        is_best = result is report.best
        texts = [Text(cell, style=_style(title, cell, is_best)) for title, cell in zip(columns, cells, strict=True)]
        table.add_row(*texts)
    return table


def _job_columns(report: Report) -> dict[str, list[str]]:
    """Every column by its title, without the empty ones."""
    results = report.results
    goals = [goal.metric for goal in report.goals]
    tests = sorted({name for result in results for name in result.metrics if name.startswith("test/")} - set(goals))
    said = {"device"} & set(report.keys)  # the names tell it already
    columns = {
        "job": [f"{'*' if result.job in report.front else ''}{result.job}" for result in results],
        "name": [result.name for result in results],
        "state": [result.state for result in results],
        "device": [result.device or "" if not said else "" for result in results],
        **{metric: [wording.value(result.value(metric)) for result in results] for metric in goals},
        "step": [str(result.best.step) if _has_best(result) and result.best else "" for result in results],
        "epoch": [str(result.best.epoch or "") if _has_best(result) and result.best else "" for result in results],
        **{name: [wording.value(result.metrics.get(name)) for result in results] for name in tests},
        "steps/s": [wording.speed(result.steps_per_second) for result in results],
        "samples/s": [wording.speed(result.samples_per_second) for result in results],
        "trained": [wording.seconds(result.seconds_train) for result in results],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _seeds(report: Report) -> Table:
    metrics = list(dict.fromkeys(name for group in report.seeds for name in group.means))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("jobs", overflow="fold")
    table.add_column("n", justify="right")
    for name in metrics:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for group in report.seeds:
        cells = (wording.mean(group.means.get(name)) for name in metrics)
        table.add_row(Text(group.name), str(len(group.jobs)), *cells)
    return table


def _devices(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("jobs", overflow="fold")
    table.add_column("device", no_wrap=True)
    for title in ("samples/s", "speed-up", "to best", "loss differs"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in report.devices:
        for row in each.rows:
            is_reference = row is each.rows[0]
            apart = f"{wording.difference(row.difference)} @ {row.difference_step}" if row.difference else ""
            table.add_row(
                Text(each.name if is_reference else ""),
                Text(row.device),
                wording.speed(row.samples_per_second),
                "" if is_reference or row.speed_up is None else f"{wording.factor(row.speed_up)} x",
                wording.seconds(row.seconds_to_best),
                "" if is_reference else apart or wording.difference(row.difference),
            )
    return table


def _causes(results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for result in results:
        said = Text(result.error or "it left no reason")
        log = Text(f"  {result.folder}/console.log", style="dim") if result.folder and result.state != "skipped" else ""
        table.add_row(str(result.job), Text(result.name), Text.assemble(said, log))
    return table


def _has_best(result: Result) -> bool:
    return result.best is not None and result.best.value is not None


def _style(title: str, cell: str, is_best: bool) -> str:
    return COLORS.get(cell, "") if title == "state" else "bold" if is_best else ""


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _table(console: Console, table: Table) -> None:
    console.print(table, soft_wrap=False)
