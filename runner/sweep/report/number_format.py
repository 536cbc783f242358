"""How a person reads a report's numbers, the same in the terminal and on the page."""

from __future__ import annotations

from runner.experiment.terminal import readable
from runner.experiment.terminal import seconds as seconds
from runner.sweep.report.report import Report
from runner.sweep.report.seeds import Mean


def value(number: float | None) -> str:
    """A metric's value; empty where there is none."""
    return "" if number is None else readable(number)


def mean(found: Mean | None) -> str:
    """The mean and, of two values or more, the sample's standard deviation; over folds its interval."""
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
    """12 jobs: 10 finished, 1 skipped, 1 failed."""
    total = len(report.results)
    parts = ", ".join(f"{number} {state}" for state, number in report.counts.items())
    return f"{total} job{'' if total == 1 else 's'}" + (f": {parts}" if parts else "")
