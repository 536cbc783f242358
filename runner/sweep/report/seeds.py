"""Jobs that are equal but for one key, together: the means over their seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from runner.sweep.report.ranking import Goal
from runner.sweep.report.results import Result, differing_keys


@dataclass(frozen=True)
class Mean:
    """Over the seeds of a group; `std` is the sample's (n - 1), None for a single value."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Seeds:
    """Finished jobs that are equal but for their seed."""

    name: str
    jobs: tuple[int, ...]
    means: dict[str, Mean]  # by metric: the goals' best values, then the test metrics


def over_seeds(results: Sequence[Result], goals: Sequence[Goal]) -> list[Seeds]:
    """The groups, best mean first; [] when none of them has two seeds."""
    groups = equal_but_for("seed", results)
    if not any(len({result.keys.get("seed") for result in group}) > 1 for group in groups.values()):
        return []
    found = [Seeds(name, tuple(result.job for result in group), _means(group, goals)) for name, group in groups.items()]

    def key(seeds: Seeds) -> tuple[bool, float, int]:
        mean = seeds.means.get(goals[0].metric) if goals else None
        if mean is None or math.isnan(mean.mean):
            return True, 0.0, seeds.jobs[0]
        return False, mean.mean if goals[0].mode == "min" else -mean.mean, seeds.jobs[0]

    return sorted(found, key=key)


def equal_but_for(key: str, results: Sequence[Result]) -> dict[str, list[Result]]:
    """The finished jobs by all their other overrides, named by what sets the groups apart; each by number."""
    groups: dict[tuple[tuple[str, str], ...], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.job):
        if result.state == "finished":
            rest = tuple(sorted(pair for pair in result.keys.items() if pair[0] != key))
            groups.setdefault(rest, []).append(result)
    apart = [name for name in differing_keys(results) if name != key]
    return {_name(group[0], apart): group for group in groups.values()}


def _means(group: Sequence[Result], goals: Sequence[Goal]) -> dict[str, Mean]:
    tests = sorted({name for result in group for name in result.metrics if name.startswith("test/")})
    names = dict.fromkeys([*(goal.metric for goal in goals), *tests])
    means = {name: _mean([result.value(name) for result in group]) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if not all(map(math.isfinite, known)):
        return Mean(math.nan, None, len(known))
    return Mean(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def _name(result: Result, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={result.keys[key]}" for key in keys if key in result.keys) or "all"
