"""Finished jobs that are equal but for their seed go in; one configuration beside another comes out: which is better, if any.

For the report and `runner compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.sweep.report.ranking import Goal
from runner.sweep.report.results import Result
from runner.sweep.report.significance import Difference, difference

#: seeds of each: with fewer hardly anything is decided
FIRST_LOOK = 8


@dataclass(frozen=True)
class Configuration:
    """The finished jobs that are one configuration, and the goals of the sweep that they are of."""

    name: str
    results: tuple[Result, ...]
    goals: tuple[Goal, ...]

    def values(self, metric: str) -> dict[int, float]:
        """By seed."""
        found = {result.seed: result.value(metric) for result in self.results}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """A beside B in one metric."""

    a: str
    b: str
    metric: str
    mode: str
    mean_a: float
    mean_b: float
    difference: Difference

    @property
    def verdict(self) -> str:
        """What A is."""
        return self.difference.verdict(self.mode)


def looks(max_seeds: int) -> list[int]:
    """At how many seeds sweep.until=decided looks: 8, 16, 32, ... and, last of all, max_seeds."""
    sizes = [FIRST_LOOK]
    while sizes[-1] * 2 < max_seeds:
        sizes.append(sizes[-1] * 2)
    return [*sizes, max_seeds] if max_seeds > sizes[-1] else sizes


def against_best(groups: Mapping[str, Sequence[Result]], goal: Goal, *, num_looks: int = 1) -> list[Comparison]:
    """The best configuration beside each other one; [] for fewer than two. num_looks: at which a winner may be named."""
    sign = 1 if goal.mode == "min" else -1
    all_of = [Configuration(name, tuple(results), (goal,)) for name, results in groups.items()]
    means = {each.name: _mean(each.values(goal.metric).values()) for each in all_of}
    judged = sorted(
        (each for each in all_of if means[each.name] is not None), key=lambda each: sign * (means[each.name] or 0)
    )
    pairs = len(judged) * (len(judged) - 1) // 2 * num_looks  # the best was looked for among all of them
    found = [
        compared(judged[0], other, goal, (judged[0].name, other.name), num_comparisons=pairs) for other in judged[1:]
    ]
    return [each for each in found if each is not None]


def compared(
    a: Configuration, b: Configuration, goal: Goal, names: tuple[str, str], *, num_comparisons: int = 1
) -> Comparison | None:
    of_a, of_b = a.values(goal.metric), b.values(goal.metric)
    apart = difference(of_a, of_b, num_comparisons=num_comparisons)
    mean_a, mean_b = _mean(of_a.values()), _mean(of_b.values())
    if apart is None or mean_a is None or mean_b is None:
        return None
    return Comparison(*names, goal.metric, goal.mode, mean_a, mean_b, apart)


def as_values(found: Comparison) -> dict[str, Any]:
    """For programs."""
    return {**asdict(found), "verdict": found.verdict}


def words_of(found: Comparison) -> str:
    """better; worse; undecided: about 9 more seeds."""
    if found.difference.is_decided:
        return found.verdict
    more = found.difference.more_seeds
    seeds = "seed" if more == 1 else "seeds"
    return f"undecided: about {more:,} more {seeds}" if more else "undecided: no difference that seeds would show"


def _mean(values: Any) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
