"""Jobs that are equal but for one key, together; those of one configuration, and the means over their seeds and folds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.config.validate import of_all_folds
from runner.sweep.report.ranking import Goal
from runner.sweep.report.results import Result, differing_keys
from runner.sweep.report.significance import independent, interval

Keys = dict[str, str]


@dataclass(frozen=True)
class Mean:
    """Over the jobs of a group; `std` is the sample's (n - 1), None for a single value."""

    mean: float
    std: float | None
    n: int
    low: float | None = None  # of the mean, at 95 %; where there are several folds
    high: float | None = None


@dataclass(frozen=True)
class Seeds:
    """Finished jobs that are equal but for their seed and their fold."""

    name: str
    jobs: tuple[int, ...]
    means: dict[str, Mean]  # by metric: the goals' best values, then the test metrics
    num_seeds: int = 1
    num_folds: int = 0  # 0: without folds; 1: all of them have the same one


def in_words(groups: Sequence[Seeds]) -> str:
    """What the means are taken over: seeds, folds, seeds and folds."""
    seeds, folds = any(each.num_seeds > 1 for each in groups), any(each.num_folds > 1 for each in groups)
    return " and ".join(filter(None, ("seeds" * (seeds or not folds), "folds" * folds)))


def over_seeds(results: Sequence[Result], goals: Sequence[Goal]) -> list[Seeds]:
    """The groups, best mean first; [] when none of them has two seeds or two folds."""
    all_of_them = configurations(results)  # named beside those that diverged, as the comparisons name them
    groups = {name: [each for each in group if not each.diverged] for name, group in all_of_them.items()}
    groups = {name: group for name, group in groups.items() if group}
    if not any(len({(result.keys.get("seed"), result.fold) for result in group}) > 1 for group in groups.values()):
        return []
    has_folds = any(len({result.fold for result in group}) > 1 for group in groups.values())
    found = [
        Seeds(
            name,
            tuple(result.job for result in group),
            _means(group, goals, with_interval=has_folds),
            len({result.keys.get("seed") for result in group}),
            len({result.fold for result in group if result.fold}),
        )
        for name, group in groups.items()
    ]

    def key(seeds: Seeds) -> tuple[bool, float, int]:
        mean = seeds.means.get(goals[0].metric) if goals else None
        if mean is None or math.isnan(mean.mean):
            return True, 0.0, seeds.jobs[0]
        return False, mean.mean if goals[0].mode == "min" else -mean.mean, seeds.jobs[0]

    return sorted(found, key=key)


def configurations(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups the jobs that finished or diverged by configuration: a group differs only in seeds, and in folds of one set."""
    bare = [replace(result, keys=_without_seed(result.keys)) for result in results]
    apart, groups = differing_keys(bare), dict[str, list[Result]]()
    for result, own in sorted(zip(results, bare, strict=True), key=lambda pair: pair[0].job):
        if result.state == "finished" or result.diverged:
            groups.setdefault(_name(own, apart), []).append(result)
    return groups


def _without_seed(keys: Keys) -> Keys:
    own = {key: value for key, value in keys.items() if key != "seed"}
    return own | {key: of_all_folds(value) for key, value in own.items() if key == "data.fold"}


def _means(group: Sequence[Result], goals: Sequence[Goal], *, with_interval: bool) -> dict[str, Mean]:
    tests = sorted({name for result in group for name in result.metrics if name.startswith("test/")})
    names = dict.fromkeys([*(goal.metric for goal in goals), *tests])
    means = {name: _mean(group, name, with_interval=with_interval) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(group: Sequence[Result], metric: str, *, with_interval: bool) -> Mean | None:
    found = [(result, result.value(metric)) for result in group]
    known = [value for _, value in found if value is not None]
    if not known:
        return None
    if not all(map(math.isfinite, known)):
        return Mean(math.nan, None, len(known))
    limits: tuple[float | None, float | None] = (None, None)
    if with_interval:
        by_place = {(result.seed, result.fold or ""): value for result, value in found if value is not None}
        by_seed = len({seed for seed, _ in by_place}) > 1
        limits = interval(tuple(independent(by_place, by_seed=by_seed).values()))
    return Mean(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known), *limits)


def _name(result: Result, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={result.keys[key]}" for key in keys if key in result.keys) or "all"
