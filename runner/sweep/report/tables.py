"""The report's tables as columns of cells, and its numbers as text, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from runner.experiment.terminal import readable
from runner.experiment.terminal import seconds as seconds
from runner.sweep.report.comparisons import Comparison, Mean
from runner.sweep.report.report import Report
from runner.sweep.report.results import JobResult


class Cell(NamedTuple):
    """A text, and the value by which its column is sorted (None: always last)."""

    text: str
    value: Any = None


Columns = dict[str, list[Cell]]
#: columns of text; all others have numbers
WORDS = ("jobs", "compared with the best", "name", "state", "device", "cause", "where to look")


def jobs(report: Report) -> Columns:
    """Return all jobs, best first, without empty columns."""
    results = report.results
    goals = [goal.metric for goal in report.goals]
    tests = sorted({name for result in results for name in result.metrics if name.startswith("test/")} - set(goals))
    kept = [each.best if each.best and each.best.value is not None else None for each in results]
    columns = {
        "job": [Cell(f"{'*' * (each.job in report.front)}{each.job}", each.job) for each in results],
        "name": _cells(str, [each.name for each in results]),
        "state": _cells(str, [each.state for each in results]),
        "device": _cells(str, [each.device for each in results]),
        **{name: _cells(value, [each.value(name) for each in results]) for name in goals},
        "step": _cells("{:,}".format, [best and best.step for best in kept]),
        "epoch": _cells(str, [best and best.epoch for best in kept]),
        **{name: _cells(value, [each.metrics.get(name) for each in results]) for name in tests},
        "steps/s": _of_trained(results, speed, "steps_per_second"),
        "samples/s": _of_trained(results, speed, "samples_per_second"),
        "trained": _of_trained(results, seconds, "seconds_train"),
    }
    return {title: cells for title, cells in columns.items() if any(cell.text for cell in cells)}


def seeds(report: Report) -> Columns:
    """Return the mean ± the sample's standard deviation of each group."""
    metrics = dict.fromkeys(name for group in report.seeds for name in group.means)
    verdicts = {each.b: _verdict(each) for each in report.comparisons}
    if report.winner:
        verdicts[report.winner] = "better"
    return {
        "jobs": _cells(str, [group.name for group in report.seeds]),
        "n": _cells(str, [len(group.jobs) for group in report.seeds]),
        **(
            {"compared with the best": _cells(str, [verdicts.get(group.name) for group in report.seeds])}
            if verdicts
            else {}
        ),
        **{name: _cells(mean, [group.means.get(name) for group in report.seeds]) for name in metrics},
    }


def _verdict(found: Comparison) -> str:
    if found.difference.is_decided:
        return "worse" if found.verdict == "better" else "better"
    more = found.difference.more_seeds
    return f"undecided: ~{more} {found.unit if more > 1 else found.unit[:-1]}" if more else "undecided"


def causes(results: Sequence[JobResult]) -> Columns:
    """Return why jobs failed or were skipped, and where to look."""
    logs = [f"{each.folder}/console.log" if each.folder and each.state != "skipped" else None for each in results]
    return {
        "job": _cells(str, [each.job for each in results]),
        "name": _cells(str, [each.name for each in results]),
        "state": _cells(str, [each.state for each in results]),
        "cause": _cells(str, [each.error or "it left no reason" for each in results]),
        "where to look": _cells(str, logs),
    }


def value(number: float | None) -> str:
    """Return a metric's value; empty for None."""
    return "" if number is None else readable(number)


def mean(found: Mean | None) -> str:
    """Return the mean and, for several values, the sample's standard deviation; over folds the interval."""
    if found is None:
        return ""
    if found.low is not None:
        return f"{value(found.mean)} ({value(found.low)} to {value(found.high)})"
    return value(found.mean) + (f" ± {value(found.std)}" if found.std is not None else "")


def speed(per_second: float | None) -> str:
    if per_second is None:
        return ""
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.2g}"


def counts(report: Report) -> str:
    """Return `12 jobs: 10 finished, 1 skipped, 1 failed`."""
    total = len(report.results)
    parts = ", ".join(f"{number} {state}" for state, number in report.counts.items())
    return f"{total} job{'' if total == 1 else 's'}" + (f": {parts}" if parts else "")


def _of_trained(results: Sequence[JobResult], show: Callable[[Any], str], name: str) -> list[Cell]:
    return _cells(show, [getattr(each, name) if each.num_steps else None for each in results])


def _cells(show: Callable[[Any], str], values: Iterable[Any]) -> list[Cell]:
    return [Cell("" if value is None else show(value), value) for value in values]
