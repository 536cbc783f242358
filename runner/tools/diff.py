"""`diff`: what differs between runs, and the step at which their curves diverge.

It shares with `reproduce` what a run was made with (runs/reproduce/recorded.py) and how curves are compared (compare.py there).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from string import ascii_uppercase
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from runner.command import Arguments, Facts
from runner.config import defaults
from runner.config.trust import check_folder
from runner.errors import RunnerError
from runner.experiment.terminal import Terminal, readable, text_table
from runner.runs.reproduce.compare import CurveComparison, Points, compare_all, where_parted
from runner.runs.reproduce.recorded import (
    RecordedRun,
    ValueDifference,
    differing,
    of_run,
    of_values,
    open_recorded,
    unknown,
)
from runner.sweep.jobs import ledger
from runner.tasks.metric_names import is_rising
from runner.tools.compare import sweep_folder
from runner.tracking import stores
from runner.tracking.mlflow_names import Names

FORMS = "name two or more: the directory of a run or a sweep, an MLflow run id, or `last`"
MAX_COLUMNS = 4  # runs side by side; more of them have a row each


@dataclass(frozen=True)
class DiffRun:
    """A run of a diff."""

    original: RecordedRun
    words: str  # the overrides that change the defaults
    values: dict[str, tuple[float, float, int]]  # by metric: the last value, the best value, its step


@dataclass(frozen=True)
class Diff:
    """The differences between runs. Each run's curves are compared with those of the first run."""

    runs: tuple[DiffRun, ...]
    configuration: list[ValueDifference]
    made_with: list[ValueDifference]
    unknown: tuple[str, ...]  # what at least one run has not recorded
    curves: tuple[list[CurveComparison], ...]

    @property
    def sentence(self) -> str:
        """Where the first two runs diverge."""
        first, compared = where_parted(self.curves[0]), [each for each in self.curves[0] if each.num_common]
        if first is not None:
            at = f"{first.name} parts at step {first.parted_step}, by {first.parted_by:.1e}"
            if first.then is None or first.now is None or first.first_step is None:
                return at
            values = f"{first.then:.9g} in A, {first.now:.9g} in B"
            if first.first_step == first.parted_step:
                return f"{at} ({values})"
            return f"{at}, and by more than 1e-5 from step {first.first_step} on ({values})"
        if not compared:
            return "their curves have no point in common"
        count = sum(each.num_common for each in compared)
        return f"their curves are bitwise identical ({count:,} points of {len(compared)} metrics)"


def run(given: Arguments) -> Facts:
    with opened(given.values, uri=stores.named(given.words) or stores.USUAL) as originals:
        found = diff(originals)
        if not any(each.store for each in originals):
            stores.note_unused(given.words)
        show(found)
    return as_values(found)


@contextmanager
def opened(words: Sequence[str], *, uri: str) -> Iterator[list[RecordedRun]]:
    """Open runs, each a directory, `last` or an MLflow run id; a sweep stands for its jobs.

    Raises:
        RunnerError: Fewer than two runs, or an unknown one.
    """
    runs = [run for word in words for run in (_jobs(word) or [word])]
    if len(runs) < 2:
        problem = "`diff` takes two runs or more" if len(words) < 2 else "the sweep has no job that has begun"
        raise RunnerError.of(f"diff {' '.join(words)}".strip(), problem, FORMS)
    with ExitStack() as stack:
        yield [stack.enter_context(open_recorded(run, uri=uri, trusted=True, verb="diff")) for run in runs]


def _jobs(word: str) -> list[str]:
    folder = sweep_folder(word) if word != "last" else None
    if folder is None:
        return []
    check_folder(folder)
    sweep = ledger.read(folder)
    folders = [sweep.folder_of(job) for _, job in sorted(sweep.jobs.items()) if job.folder_name]
    return [str(each) for each in folders if (each / "rerun.yaml").is_file()]


def diff(originals: Sequence[RecordedRun]) -> Diff:
    """Compare runs; 100,000 points of two take 0.1 s. Raises: RunnerError for a run and itself."""
    if len({each.folder if each.store is None else each.name for each in originals}) < len(originals):
        names = " ".join(each.name for each in originals)
        raise RunnerError.of(f"diff {names}", "both names mean the same run", "name two different runs")
    as_stored = any(each.store for each in originals)
    series = [_spelled(each, as_stored=as_stored) for each in originals]
    chosen, makings = [each.chosen() for each in originals], [of_run(each) for each in originals]
    runs = tuple(
        DiffRun(each, defaults.in_words(defaults.changed(values)), {name: _ends(name, of[name]) for name in of})
        for each, values, of in zip(originals, chosen, series, strict=True)
    )
    curves = tuple(compare_all(series[0], other, may_end_elsewhere=True) for other in series[1:])
    return Diff(runs, of_values(chosen), differing(makings), unknown(makings), curves)


def as_values(found: Diff) -> dict[str, Any]:
    """Return a diff as plain values for `--json`."""
    runs = [
        {
            "name": each.original.name,
            "run_id": each.original.run_id,
            "status": each.original.status,
            "steps": each.original.last_step,
            "changed": each.words,
            "metrics": {
                name: dict(zip(("last", "best", "best_step"), values, strict=True))
                for name, values in each.values.items()
            },
        }
        for each in found.runs
    ]
    first, *others = (run["name"] for run in runs)
    return {
        "runs": runs,
        "configuration": [asdict(each) for each in found.configuration],
        "made_with": [asdict(each) for each in found.made_with],
        "not_known": found.unknown,
        "curves": [
            {"run": name, "beside": first, "metrics": {each.name: asdict(each) for each in curves}}
            for name, curves in zip(others, found.curves, strict=True)
        ],
        "sentence": found.sentence,
    }


def _spelled(original: RecordedRun, *, as_stored: bool) -> dict[str, Points]:
    names = Names(original.series)  # in the order of the journal
    return {
        names.key(name) if as_stored else name: points for name, points in original.series.items() if len(points[0])
    }


def _ends(name: str, points: Points) -> tuple[float, float, int]:
    steps, values = points
    known = np.where(np.isnan(values), -np.inf if is_rising(name) else np.inf, values)
    best = int(known.argmax() if is_rising(name) else known.argmin())
    return float(values[-1]), float(values[best]), int(steps[best])


def show(found: Diff) -> None:
    """Print the runs, the differences in their configurations and in what they were made with, and their curves."""
    terminal, count = Terminal(soft_wrap=False), len(found.runs)
    names = list(ascii_uppercase[:count]) if count <= len(ascii_uppercase) else [str(number) for number in range(count)]
    for name, run in zip(names, found.runs, strict=True):
        was, words = run.original, f"  {run.words}" * (count == 2)
        terminal.print(Text(f"{name}  {was.name} ({was.status}, {was.last_step:,} steps){words}"), soft_wrap=True)
    for title, rows in (("configuration", found.configuration), ("made with", found.made_with)):
        terminal.print()
        terminal.print(_differences(title, rows, names) if rows else f"{title}: the same, as far as it is known")
    if found.unknown:
        terminal.print(f"not noted by all of them: {', '.join(found.unknown)}")
    terminal.print()
    terminal.print(_curves(found) if count == 2 else _curves_of_several(found, names))
    if count == 2:
        terminal.print(Text(found.sentence), soft_wrap=True)


def _differences(title: str, rows: Sequence[ValueDifference], names: Sequence[str]) -> Table:
    if len(names) <= MAX_COLUMNS:
        return text_table((title, *names), ((each.what, *each.values) for each in rows))
    columns = zip(names, *(each.values for each in rows), strict=True)
    return text_table((title, *(each.what for each in rows)), columns)


def _curves(found: Diff) -> Table:
    rows = []
    for each in found.curves[0]:
        parts = ("never" if each.num_common else "no point in common", "")
        if each.parted_step is not None:
            parts = f"{each.parted_step:,}", f"{each.parted_by:.1e}"
        ends = [run.values.get(each.name) for run in found.runs]
        rows.append((each.name, *parts, *(readable(end[place]) if end else "" for place in (0, 1) for end in ends)))
    titles = ("metric", "parts at", "by", "last A", "last B", "best A", "best B")
    return text_table(titles, rows, right=range(1, len(titles)))


def _curves_of_several(found: Diff, names: Sequence[str]) -> Table:
    metrics = [name for name in found.runs[0].values if name.startswith(("val/", "test/")) or name == "train/loss"]
    rows = []
    for name, run, curves in zip(names, found.runs, (None, *found.curves), strict=True):
        first = where_parted(curves) if curves is not None else None
        parts = f"step {first.parted_step:,}" if first and first.parted_step is not None else "nowhere"
        ends = (run.values.get(metric) for metric in metrics)
        rows.append((name, "" if curves is None else parts, *(readable(end[0]) if end else "" for end in ends)))
    return text_table(("", f"parts from {names[0]}", *metrics), rows, right=range(1, len(metrics) + 2))
