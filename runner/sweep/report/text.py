"""The report in the terminal: tables that fit 80 columns, also through a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.sweep.report import number_format
from runner.sweep.report.report import Report
from runner.sweep.report.results import Result

NAME = 50  # the name stays in one line up to here, and other columns leave for it
MOST_NAME = 200
WORDS = ("jobs", "name", "state", "device")
COLORS = {"finished": "green", "pruned": "dim", "skipped": "yellow", "failed": "red", "killed": "red"}


def show(report: Report, console: Console) -> None:
    """Prints the jobs, best first, and the tables over seeds and devices, the failures and the skipped ones."""
    _say(console, number_format.counts(report))
    if report.results:
        _table(console, _jobs(report, console.width))
    if report.front:
        _say(console, "* on the Pareto front: no other job is better in everything")
    if report.importance:
        shares = ", ".join(f"{key} {share:.2f}" for key, share in list(report.importance.items())[:6])
        _say(console, f"\nwhat mattered: {shares}")
    if report.seeds:
        _say(console, "\nover seeds, mean ± std")
        _table(console, _seeds(report, console.width))
    if report.devices:
        _say(console, "\nover devices")
        _table(console, _devices(report, console.width))
        for gain in report.gains:
            _say(console, number_format.gain(gain))
    for title, results in (("failures", report.failures), ("skipped", report.skipped)):
        if results:
            _say(console, f"\n{title}")
            _table(console, _causes(results))


def _jobs(report: Report, width: int) -> Table:
    columns = _job_columns(report)
    tests = [title for title in columns if title.startswith("test/")]
    # the first one leaves first; the page and report.csv have them all
    may_leave = ["steps/s", "epoch", "trained", "device", *tests[:0:-1], "samples/s", "state", "step", *tests[:1]]
    shown = _fit(columns, "name", may_leave, width)
    if "state" not in shown and "state" in columns and "name" in shown:
        states = [f" ({state})" if state != "finished" else "" for state in columns["state"]]
        shown["name"] = [name + state for name, state in zip(shown["name"], states, strict=True)]
    best = report.results.index(report.best) if report.best else None
    return _filled(shown, bold=best)


def _fit(columns: dict[str, list[str]], name: str, may_leave: Sequence[str], width: int) -> dict[str, list[str]]:
    """The columns without those that leave for the column `name`, so that the rest fit the width."""
    left = dict(columns)
    wanted = min(NAME, max(map(len, columns.get(name, ())), default=0))
    for title in may_leave:
        taken = sum(max(map(len, (head, *cells))) + 2 for head, cells in left.items() if head != name)
        if taken + wanted <= width:
            break
        left.pop(title, None)
    return left


def _filled(columns: dict[str, list[str]], *, bold: int | None = None) -> Table:
    """Words to the left, numbers to the right; only words may take several lines. bold: the number of a row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        is_word = title in WORDS
        table.add_column(Text(title), justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word)
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        style = "bold" if number == bold else ""
        pairs = zip(columns, cells, strict=True)
        table.add_row(*(Text(cell, style=COLORS.get(cell, "") if title == "state" else style) for title, cell in pairs))
    return table


def _job_columns(report: Report) -> dict[str, list[str]]:
    """Every column by its title, without the empty ones."""
    results = report.results
    goals = [goal.metric for goal in report.goals]
    tests = sorted({name for result in results for name in result.metrics if name.startswith("test/")} - set(goals))
    kept = [each.best if each.best and each.best.value is not None else None for each in results]
    said = {"device"} & set(report.keys)  # the names tell it already
    columns = {
        "job": [f"{'*' if result.job in report.front else ''}{result.job}" for result in results],
        "name": [_cut(result.name) for result in results],
        "state": [result.state for result in results],
        "device": [result.device or "" if not said else "" for result in results],
        **{metric: [number_format.value(result.value(metric)) for result in results] for metric in goals},
        "step": [str(best.step) if best else "" for best in kept],
        "epoch": [str(best.epoch or "") if best else "" for best in kept],
        **{name: [number_format.value(result.metrics.get(name)) for result in results] for name in tests},
        "steps/s": [number_format.speed(result.steps_per_second) for result in results],
        "samples/s": [number_format.speed(result.samples_per_second) for result in results],
        "trained": [number_format.seconds(result.seconds_train) for result in results],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _seeds(report: Report, width: int) -> Table:
    metrics = list(dict.fromkeys(name for group in report.seeds for name in group.means))
    columns = {
        "jobs": [_cut(group.name) for group in report.seeds],
        "n": [str(len(group.jobs)) for group in report.seeds],
        **{name: [number_format.mean(group.means.get(name)) for group in report.seeds] for name in metrics},
    }
    return _filled(_fit(columns, "jobs", metrics[:0:-1], width))


def _devices(report: Report, width: int) -> Table:
    pairs = [(each, row, row is each.rows[0]) for each in report.devices for row in each.rows]
    factors = [number_format.factor(row.speed_up) for _, row, _ in pairs]
    columns = {
        "jobs": [_cut(each.name) if is_reference else "" for each, _, is_reference in pairs],
        "device": [row.device for _, row, _ in pairs],
        "samples/s": [number_format.speed(row.samples_per_second) for _, row, _ in pairs],
        "speed-up": [
            f"{factor} x" if factor and not pair[2] else "" for factor, pair in zip(factors, pairs, strict=True)
        ],
        "to best": [number_format.seconds(row.seconds_to_best) for _, row, _ in pairs],
        "loss differs by": [
            "" if is_reference else number_format.difference(row.difference) for _, row, is_reference in pairs
        ],
        "at step": [
            "" if is_reference or not row.difference else str(row.difference_step) for _, row, is_reference in pairs
        ],
    }
    return _filled(_fit(columns, "jobs", ["at step"], width))


def _causes(results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for share in (None, 2, 3):
        table.add_column(overflow="fold", ratio=share)
    for result in results:
        said = Text(_cut(result.error or "it left no reason"))
        log = Text(f"  {result.folder}/console.log", style="dim") if result.folder and result.state != "skipped" else ""
        table.add_row(str(result.job), Text(_cut(result.name)), Text.assemble(said, log))
    return table


def _cut(text: str) -> str:
    return text if len(text) <= MOST_NAME else text[: MOST_NAME - 1] + "…"


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _table(console: Console, table: Table) -> None:
    console.print(table, soft_wrap=False)
