"""`diff`: says what is not the same in two runs or more, and where their curves part. For cli/diff.py.

It shares with `reproduce` what a run was made with (reproduce/making.py) and how curves are compared (reproduce/compare.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.config import defaults
from runner.errors import Problem, RunnerError
from runner.runs.reproduce.compare import Comparison, Points, compare_all, where_parted
from runner.runs.reproduce.making import Difference, differing, of_run, of_values, unknown
from runner.runs.reproduce.original import original
from runner.runs.reproduce.recorded import Original
from runner.tasks.metric_names import is_rising
from runner.tracking.mlflow_names import Names


@dataclass(frozen=True)
class Run:
    """A run beside others."""

    original: Original
    words: str  # what differs from the defaults, as one would type it
    values: dict[str, tuple[float, float, int]]  # of each metric the last value, the best one and its step


@dataclass(frozen=True)
class Diff:
    """What is not the same. Of the curves each later run is compared with the first one."""

    runs: tuple[Run, ...]
    configuration: list[Difference]
    made_with: list[Difference]
    unknown: tuple[str, ...]  # what at least one run has not noted, so that it could not be compared
    curves: tuple[list[Comparison], ...]

    @property
    def sentence(self) -> str:
        """Where the first two part."""
        found = self.curves[0]
        first, compared = where_parted(found), [each for each in found if each.num_common]
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
        return f"their curves are the same to the bit ({count:,} points of {len(compared)} metrics)"


@contextmanager
def opened(wanted: Sequence[str], *, uri: str) -> Iterator[list[Original]]:
    """Open runs, each a directory, `last` or an MLflow run id. Raises: RunnerError."""
    with ExitStack() as stack:
        yield [stack.enter_context(original(word, uri=uri, trusted=True, verb="diff")) for word in wanted]


def diff(originals: Sequence[Original]) -> Diff:
    """Compares them; 100,000 points of two take 0.1 s. Raises: RunnerError for a run beside itself."""
    if len({each.folder if each.store is None else each.name for each in originals}) < len(originals):
        names = " ".join(each.name for each in originals)
        raise RunnerError(Problem(f"diff {names}", "a run does not differ from itself", "diff A B, two runs"))
    series = [_spelled(each, as_stored=any(other.store for other in originals)) for each in originals]
    chosen, makings = [each.chosen() for each in originals], [of_run(each) for each in originals]
    runs = [
        Run(
            each,
            defaults.in_words(defaults.changed(values)),
            {name: _ends(name, points) for name, points in of.items()},
        )
        for each, values, of in zip(originals, chosen, series, strict=True)
    ]
    return Diff(
        tuple(runs),
        of_values(chosen),
        differing(makings),
        unknown(makings),
        tuple(compare_all(series[0], other, may_end_elsewhere=True) for other in series[1:]),
    )


def as_values(found: Diff) -> dict[str, Any]:
    """For programs; numbers that JSON has not are None there."""
    return {
        "runs": [
            {
                "name": each.original.name,
                "run_id": each.original.run_id,
                "status": each.original.status,
                "steps": each.original.last_step,
                "changed": each.words,
                "metrics": {
                    name: {"last": last, "best": best, "best_step": step}
                    for name, (last, best, step) in each.values.items()
                },
            }
            for each in found.runs
        ],
        "configuration": [dataclasses.asdict(each) for each in found.configuration],
        "made_with": [dataclasses.asdict(each) for each in found.made_with],
        "not_known": found.unknown,
        "curves": [
            {
                "run": run.original.name,
                "beside": found.runs[0].original.name,
                "metrics": {each.name: dataclasses.asdict(each) for each in curves},
            }
            for run, curves in zip(found.runs[1:], found.curves, strict=True)
        ],
        "sentence": found.sentence,
    }


def _spelled(original: Original, *, as_stored: bool) -> dict[str, Points]:
    names = Names(original.series)  # in the order of the journal
    return {
        names.key(name) if as_stored else name: points for name, points in original.series.items() if len(points[0])
    }


def _ends(name: str, points: Points) -> tuple[float, float, int]:
    steps, values = points
    known = np.where(np.isnan(values), -np.inf if is_rising(name) else np.inf, values)
    best = int(known.argmax() if is_rising(name) else known.argmin())
    return float(values[-1]), float(values[best]), int(steps[best])
