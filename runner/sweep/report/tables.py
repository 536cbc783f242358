"""The page's tables as HTML, every text of a person's escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from runner.sweep.report import number_format
from runner.sweep.report.report import Report
from runner.sweep.report.results import Result

Cell = tuple[str, float | str | None]  # (HTML, what the column is sorted by; None: always last)


def jobs_table(report: Report) -> str:
    """Every job, best first; a click on a column's head sorts by it."""
    goals = [goal.metric for goal in report.goals]
    tests = sorted({name for each in report.results for name in each.metrics if name.startswith("test/")} - set(goals))
    heads = ["job", "name", *goals, "state", "device", "step", "epoch", *tests, "steps/s", "samples/s", "trained"]
    rows = [_job_cells(result, report, goals, tests) for result in report.results]
    words = ("job", "name", "state", "device")
    filled = [number for number, head in enumerate(heads) if head in words or any(row[number][0] for row in rows)]
    head = "".join(
        f'<th scope="col"{_kind(heads[number], words)}><button type="button">{escape(heads[number])}</button></th>'
        for number in filled
    )
    body = "".join(
        f'<tr data-job="{result.job}"{_row_kind(result, report)}>'
        + "".join(
            f"<td{_kind(heads[number], words)}{_sorted_by(row[number][1])}>{row[number][0]}</td>" for number in filled
        )
        + "</tr>\n"
        for result, row in zip(report.results, rows, strict=True)
    )
    front = '<p class="note">* on the Pareto front: no other job is better in everything.</p>' if report.front else ""
    table = f'<table class="jobs sortable"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>'
    return f'<div class="scroll tall">{table}</div>{front}'


def devices_table(report: Report) -> str:
    """Each set of jobs that differ in their device alone, the reference first."""
    heads = ("jobs", "device", "samples/s", "speed-up", "to best", "loss curves differ by", "at step", "job")
    rows = []
    for each in report.devices:
        for row in each.rows:
            is_reference = row is each.rows[0]
            factor = "" if is_reference or row.speed_up is None else f"{number_format.factor(row.speed_up)}×"
            cells = (
                _name(each.name) if is_reference else "",
                escape(row.device),
                number_format.speed(row.samples_per_second),
                "reference" if is_reference else f"<b>{factor}</b>",
                number_format.seconds(row.seconds_to_best),
                "" if is_reference else number_format.difference(row.difference),
                "" if is_reference or not row.difference else f"{row.difference_step:,}",
                str(row.job),
            )
            rows.append(cells)
    lines = "".join(f"<p><b>{escape(number_format.gain(gain))}</b></p>" for gain in report.gains)
    note = '<p class="note">0 means equal to the bit, over every step that both have.</p>'
    return lines + _plain_table(heads, rows, ("jobs", "device")) + note


def seeds_table(report: Report) -> str:
    """Mean ± the sample's standard deviation of each group."""
    metrics = list(dict.fromkeys(name for group in report.seeds for name in group.means))
    rows = [
        (_name(group.name), str(len(group.jobs)), *(number_format.mean(group.means.get(name)) for name in metrics))
        for group in report.seeds
    ]
    return _plain_table(("jobs", "n", *metrics), rows, ("jobs",))


def causes_table(results: Sequence[Result]) -> str:
    """What ended jobs early, or kept them from running, and where to look."""
    rows = []
    for result in results:
        log = f"{result.folder}/console.log" if result.folder and result.state != "skipped" else ""
        said = escape(result.error or "it left no reason")
        rows.append(
            (
                str(result.job),
                _name(result.name),
                result.state,
                said,
                f"<a href='{escape(quote(log))}'>{escape(log)}</a>" if log else "",
            )
        )
    return _plain_table(
        ("job", "name", "state", "cause", "where to look"), rows, ("name", "state", "cause", "where to look")
    )


def _job_cells(result: Result, report: Report, goals: Sequence[str], tests: Sequence[str]) -> list[Cell]:
    best = result.best if result.best is not None and result.best.value is not None else None
    error = f'<span class="reason">{escape(result.error)}</span>' if result.error else ""
    star = "*" if result.job in report.front else ""
    values = [result.value(name) for name in goals], [result.metrics.get(name) for name in tests]
    trained = bool(result.num_steps)
    speeds = (result.steps_per_second, result.samples_per_second) if trained else (None, None)
    return [
        (f"{result.job}{star}", float(result.job)),
        (_name(result.name) + error, result.name),
        *((number_format.value(value), value) for value in values[0]),
        (f'<span class="state {escape(result.state)}">{escape(result.state)}</span>', result.state),
        (escape(result.device or ""), result.device),
        (f"{best.step:,}" if best else "", float(best.step) if best else None),
        (str(best.epoch or "") if best else "", best.epoch if best else None),
        *((number_format.value(value), value) for value in values[1]),
        *((number_format.speed(value), value) for value in speeds),
        (number_format.seconds(result.seconds_train), result.seconds_train) if trained else ("", None),
    ]


def _row_kind(result: Result, report: Report) -> str:
    return ' class="best"' if result is report.best else f' class="{escape(result.state)}"'


def _plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    """The cells are HTML already."""
    kinds = [_kind(name, words) for name in heads]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _name(name: str) -> str:
    """key=value words with the keys in the background; the whole name on hovering."""
    words = []
    for word in name.split(" "):
        key, sign, value = word.partition("=")
        words.append(f"<span>{escape(key)}=</span>{escape(value)}" if sign else escape(word))
    return f'<div class="name" title="{escape(name)}">{" ".join(words)}</div>'


def _kind(head: str, words: Sequence[str]) -> str:
    return "" if head in words else ' class="num"'


def _sorted_by(value: float | str | None) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f' data-value="{escape(str(value))}"'
