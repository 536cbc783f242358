"""The report of a sweep as plain values: its jobs best first, the means over seeds and folds, and which configuration is better.

For the text, the files, the page and the sweep's run in MLflow. Jobs that differ only in seed and fold are one configuration.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.config.validate import of_all_folds
from runner.errors import without_password
from runner.sweep.jobs import ledger
from runner.sweep.report.results import (
    FAILURES,
    GOOD,
    RANK,
    Goal,
    JobResult,
    best_first,
    differing_keys,
    find_front,
    find_goals,
    read_results,
)
from runner.sweep.report.significance import Difference, SeedAndFold, difference, independent, interval

FIRST_LOOK = 8  # seeds of each: with fewer hardly anything is decided


@dataclass(frozen=True)
class Mean:
    """The mean over a group's jobs."""

    mean: float
    std: float | None  # the sample's (n - 1); None for a single value
    n: int
    low: float | None = None  # of the mean, at 95 %; where there are several folds
    high: float | None = None


@dataclass(frozen=True)
class Seeds:
    """Finished jobs that differ only in seed and fold."""

    name: str
    jobs: tuple[int, ...]
    means: dict[str, Mean]  # by metric: the goals' best values, then the test metrics
    num_seeds: int = 1
    num_folds: int = 0  # 0: without folds; 1: all of them have the same one


@dataclass(frozen=True)
class Configuration:
    """The finished or diverged jobs of a configuration, their sweep's goals, and at how many numbers of seeds it may name a winner."""

    name: str
    results: tuple[JobResult, ...]
    goals: tuple[Goal, ...]
    num_looks: int = 1

    def values(self, goal: Goal) -> dict[SeedAndFold, float]:
        """Return the values by seed and fold, infinitely bad where the training diverged."""
        each = {(result.seed, result.fold or ""): result.reached(goal.metric, goal.mode) for result in self.results}
        return {key: value for key, value in each.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """Two configurations in one metric. Where they share seeds, the means are over those, as the difference is."""

    a: str
    b: str
    metric: str
    mode: str
    mean_a: float
    mean_b: float
    difference: Difference
    unit: str = "seeds"  # what was compared one by one: seeds, or the folds of one seed

    @property
    def verdict(self) -> str:
        """Whether A is better, worse or undecided."""
        return self.difference.verdict(self.mode)


def in_words(groups: Sequence[Seeds]) -> str:
    """Return what the means are taken over: seeds, folds, seeds and folds."""
    seeds, folds = any(each.num_seeds > 1 for each in groups), any(each.num_folds > 1 for each in groups)
    return " and ".join(filter(None, ("seeds" * (seeds or not folds), "folds" * folds)))


def over_seeds(results: Sequence[JobResult], goals: Sequence[Goal]) -> list[Seeds]:
    """Return the groups, best mean first; [] without two seeds or two folds in one."""
    # named among those that diverged, as the comparisons name them
    groups = {name: [each for each in group if not each.diverged] for name, group in configurations(results).items()}
    has_folds = any(len({result.fold for result in group}) > 1 for group in groups.values())
    every = []
    for name, group in groups.items():
        if group:
            num_seeds = len({result.keys.get("seed") for result in group})
            num_folds = len({result.fold for result in group if result.fold})
            means = _means(group, goals, with_interval=has_folds)
            every.append(Seeds(name, tuple(result.job for result in group), means, num_seeds, num_folds))

    def key(seeds: Seeds) -> tuple[bool, float, int]:
        mean = seeds.means.get(goals[0].metric) if goals else None
        if mean is None or math.isnan(mean.mean):
            return True, 0.0, seeds.jobs[0]
        return False, mean.mean if goals[0].mode == "min" else -mean.mean, seeds.jobs[0]

    return sorted(every, key=key) if has_folds or any(each.num_seeds > 1 for each in every) else []


def configurations(results: Sequence[JobResult]) -> dict[str, list[JobResult]]:
    """Group the jobs that finished or diverged by configuration: a group differs only in seeds, and in folds of one set."""
    chosen = {result.job: _without_seed(result.keys) for result in results}
    differing, groups = differing_keys(list(chosen.values())), dict[str, list[JobResult]]()
    for result in sorted(results, key=lambda result: result.job):
        if result.state == "finished" or result.diverged:
            own = chosen[result.job]
            name = " ".join(f"{key}={own[key]}" for key in differing if key in own)
            groups.setdefault(name or "all", []).append(result)
    return groups


def _without_seed(keys: Mapping[str, str]) -> dict[str, str]:
    own = {key: value for key, value in keys.items() if key != "seed"}
    return own | {key: of_all_folds(value) for key, value in own.items() if key == "data.fold"}


def _means(group: Sequence[JobResult], goals: Sequence[Goal], *, with_interval: bool) -> dict[str, Mean]:
    tests = sorted({name for result in group for name in result.metrics if name.startswith("test/")})
    names = dict.fromkeys([*(goal.metric for goal in goals), *tests])
    means = {name: _mean_of_jobs(group, name, with_interval=with_interval) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean_of_jobs(group: Sequence[JobResult], metric: str, *, with_interval: bool) -> Mean | None:
    known = [(result, value) for result in group if (value := result.value(metric)) is not None]
    values = [value for _, value in known]
    if not values or not all(map(math.isfinite, values)):
        return Mean(math.nan, None, len(values)) if values else None
    mean = Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))
    if not with_interval:
        return mean
    each = {(result.seed, result.fold or ""): value for result, value in known}
    low, high = interval(tuple(independent(each, by_seed=len({seed for seed, _ in each}) > 1).values()))
    return replace(mean, low=low, high=high)


def looks(max_seeds: int) -> list[int]:
    """Return at how many seeds sweep.until=decided looks: 8, 16, 32, ... and max_seeds."""
    sizes = [FIRST_LOOK]
    while sizes[-1] * 2 < max_seeds:
        sizes.append(sizes[-1] * 2)
    return [*sizes, max_seeds] if max_seeds > sizes[-1] else sizes


def num_looks(max_seeds: int | None) -> int:
    """Return at how many numbers of seeds a sweep may name a winner (max_seeds None: it adds no seeds)."""
    return 1 if max_seeds is None else len(looks(max_seeds))


def against_best(groups: Mapping[str, Sequence[JobResult]], goal: Goal, *, num_looks: int = 1) -> list[Comparison]:
    """Compare the best configuration with each other one; [] for fewer than two.

    The best is the one with the best mean that is worse than no other: where seeds are missing, a mean may be of easier ones.
    It wins if each comparison says so at the level of two: it is taken for the best by chance no more often than among two
    (Gutmann and Maymin 1987). If only some do, each must be as sure as the number of pairs asks.

    num_looks: At how many numbers of seeds a winner may be named.
    """
    known = [Configuration(name, tuple(results), (goal,)) for name, results in groups.items()]
    judged = [each for each in known if each.values(goal)]
    judged.sort(key=lambda each: _mean(each.values(goal)), reverse=goal.mode == "max")
    num_pairs = len(judged) * (len(judged) - 1) // 2

    def compare(best: Configuration, num_comparisons: int) -> list[Comparison]:
        others = [each for each in judged if each is not best]
        each = [compared(best, other, goal, (best.name, other.name), num_comparisons) for other in others]
        return [comparison for comparison in each if comparison is not None]

    for best in judged:
        comparisons = compare(best, num_looks)
        if all(each.verdict == "better" for each in comparisons):
            return comparisons
        comparisons = compare(best, num_pairs * num_looks)
        if not any(each.verdict == "worse" for each in comparisons):
            return comparisons
    return compare(judged[0], num_pairs * num_looks) if judged else []


def compared(
    a: Configuration, b: Configuration, goal: Goal, names: tuple[str, str], num_comparisons: int = 1
) -> Comparison | None:
    """Compare two configurations in one metric; None if one has no value."""
    of_a, of_b = a.values(goal), b.values(goal)
    if not of_a or not of_b:
        return None
    pairs = of_a.keys() & of_b.keys() or of_a.keys() | of_b.keys()
    by_seed = len({seed for seed, _ in pairs}) > 1
    sides = [independent({key: side[key] for key in side if key in pairs}, by_seed=by_seed) for side in (of_a, of_b)]
    are_folds = not by_seed and len(pairs) > 1
    apart = difference(*sides, num_comparisons=num_comparisons, are_folds=are_folds)
    if apart is None:
        return None
    unit = "folds" if are_folds else "seeds"
    return Comparison(*names, goal.metric, goal.mode, _mean(sides[0]), _mean(sides[1]), apart, unit)


def as_values(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {**asdict(comparison), "verdict": comparison.verdict}


def words_of(comparison: Comparison) -> str:
    """Return better; worse; undecided: about 9 more seeds, or folds."""
    if comparison.difference.is_decided:
        return comparison.verdict
    more, unit = comparison.difference.more_seeds, comparison.unit
    if not more:
        return f"undecided: no difference that {unit} would show"
    return f"undecided: about {more:,} more {unit.removesuffix('s') if more == 1 else unit}"


def _mean(values: Mapping[Any, float]) -> float:
    return sum(values.values()) / len(values)


@dataclass
class Report:
    """The results of a sweep as plain values, which depend only on its directory."""

    folder: Path
    uid: str
    began_ms: int
    overrides: tuple[str, ...]  # of the command line
    objectives: tuple[dict[str, str], ...]  # of a search; of a grid: empty
    goals: tuple[Goal, ...]  # metrics that decide the order, also of a grid; empty: no job has metrics
    results: list[JobResult]  # best first
    front: tuple[int, ...] = ()  # of two goals or more: the jobs on the Pareto front, by number
    seeds: list[Seeds] = field(default_factory=list)  # empty: no group has two seeds, or two folds
    comparisons: list[Comparison] = field(default_factory=list)  # of the best group with each other one

    @property
    def counts(self) -> dict[str, int]:
        """The number of jobs by state, in the order of the table."""
        states = Counter(result.state for result in self.results)
        return {state: states[state] for state in sorted(states, key=lambda state: (RANK.get(state, 2), state))}

    @property
    def exit_code(self) -> int:
        """1 if a job failed, was killed or has not ended, else 0; a skipped job is not a failure."""
        return int(any(each.state not in GOOD for each in self.results))

    @property
    def failures(self) -> list[JobResult]:
        return sorted((each for each in self.results if each.state in FAILURES), key=lambda each: each.job)

    @property
    def skipped(self) -> list[JobResult]:
        return [each for each in self.results if each.state == "skipped"]

    @property
    def best(self) -> JobResult | None:
        """The first job of the table, if it finished with a value."""
        first = self.results[0] if self.results else None
        if first is None or first.state != "finished" or not self.goals:
            return None
        return first if first.value(self.goals[0].metric) is not None else None

    @property
    def over(self) -> str:
        """What the means of the groups are over: seeds, folds, seeds and folds."""
        return in_words(self.seeds)

    @property
    def best_group(self) -> str | None:
        """The group of seeds that the others are compared with, else the first."""
        groups = [each.a for each in self.comparisons] or [each.name for each in self.seeds]
        return groups[0] if groups else None

    @property
    def winner(self) -> str | None:
        """The group of seeds that is significantly better than each other one."""
        verdicts = {each.verdict for each in self.comparisons}
        return self.comparisons[0].a if verdicts == {"better"} else None

    @property
    def keys(self) -> list[str]:
        """The keys that differ between the jobs."""
        return differing_keys([each.keys for each in sorted(self.results, key=lambda result: result.job)])

    @property
    def command(self) -> str:
        """The command of the sweep."""
        return f"python -m runner -m {shlex.join(self.overrides)}".strip()


def read_report(folder: Path) -> Report:
    """Read the ledger, each job's summary.json and journal: 100 jobs of 10,000 steps take seconds.

    Raises:
        RunnerError: If the directory has no sweep.
    """
    sweep = ledger.read(folder)
    results = read_results(sweep)
    goals = find_goals(sweep.objectives, results)
    seeds = over_seeds(results, goals)
    comparisons = []
    if seeds and goals:
        comparisons = against_best(configurations(results), goals[0], num_looks=num_looks(sweep.max_seeds))
    return Report(
        folder,
        sweep.uid,
        sweep.began_ms,
        tuple(map(without_password, sweep.overrides)),
        sweep.objectives,
        goals,
        best_first(results, goals),
        tuple(sorted(find_front(results, goals))),
        seeds,
        comparisons,
    )
