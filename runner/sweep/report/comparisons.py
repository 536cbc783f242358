"""Finished jobs that are equal but for their seed and fold go in; one configuration beside another comes out: which is better, if any.

For the report and `runner compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.sweep.report.ranking import Goal
from runner.sweep.report.results import Result
from runner.sweep.report.significance import Difference, Place, difference, independent

#: seeds of each: with fewer hardly anything is decided
FIRST_LOOK = 8


@dataclass(frozen=True)
class Configuration:
    """The jobs that are one configuration and came to an end by themselves, and of the sweep that they are of its goals, and
    at how many numbers of seeds it was to name a winner."""

    name: str
    results: tuple[Result, ...]
    goals: tuple[Goal, ...]
    num_looks: int = 1

    def values(self, goal: Goal) -> dict[Place, float]:
        """By seed and fold; of a training that diverged the worst there is, infinite."""
        found = {(result.seed, result.fold or ""): result.reached(goal.metric, goal.mode) for result in self.results}
        return {place: value for place, value in found.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """A beside B in one metric. Where they have seeds in common the means are over those, as the difference is."""

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
        """What A is."""
        return self.difference.verdict(self.mode)


def looks(max_seeds: int) -> list[int]:
    """At how many seeds sweep.until=decided looks: 8, 16, 32, ... and, last of all, max_seeds."""
    sizes = [FIRST_LOOK]
    while sizes[-1] * 2 < max_seeds:
        sizes.append(sizes[-1] * 2)
    return [*sizes, max_seeds] if max_seeds > sizes[-1] else sizes


def num_looks(max_seeds: int | None) -> int:
    """At how many numbers of seeds a sweep was to name a winner. max_seeds: that it was to add up to (None: it was to add none)."""
    return 1 if max_seeds is None else len(looks(max_seeds))


def against_best(groups: Mapping[str, Sequence[Result]], goal: Goal, *, num_looks: int = 1) -> list[Comparison]:
    """The best configuration beside each other one; [] for fewer than two. num_looks: at which a winner may be named.

    The best is the one with the best mean that is worse than none: where seeds are missing, a mean may be of easier ones.

    One that is better than every other is named where each of these says so by itself: it is taken for the best by chance
    no more often than among two (Gutmann and Maymin 1987, Is the selected population the best?). Where some say so, each
    must be as sure as the number of pairs asks, since the best was looked for among all of them.
    """
    sign = 1 if goal.mode == "min" else -1
    all_of = [Configuration(name, tuple(results), (goal,)) for name, results in groups.items()]
    means = {each.name: _mean(each.values(goal).values()) for each in all_of}
    judged = sorted(
        (each for each in all_of if means[each.name] is not None), key=lambda each: sign * (means[each.name] or 0)
    )

    def beside_others(best: Configuration, num_comparisons: int) -> list[Comparison]:
        others = [other for other in judged if other is not best]
        each = [
            compared(best, other, goal, (best.name, other.name), num_comparisons=num_comparisons) for other in others
        ]
        return [one for one in each if one is not None]

    num_pairs = len(judged) * (len(judged) - 1) // 2
    for best in judged:
        found = beside_others(best, num_looks)
        if all(one.verdict == "better" for one in found):
            return found
        found = beside_others(best, num_pairs * num_looks)
        if not any(one.verdict == "worse" for one in found):
            return found
    return beside_others(judged[0], num_pairs * num_looks) if judged else []


def compared(
    a: Configuration, b: Configuration, goal: Goal, names: tuple[str, str], *, num_comparisons: int = 1
) -> Comparison | None:
    of_a, of_b = a.values(goal), b.values(goal)
    places = of_a.keys() & of_b.keys() or of_a.keys() | of_b.keys()
    by_seed = len({seed for seed, _ in places}) > 1
    sides = [
        independent({place: side[place] for place in side if place in places}, by_seed=by_seed) for side in (of_a, of_b)
    ]
    apart = difference(*sides, num_comparisons=num_comparisons)
    mean_a, mean_b = (_mean(side.values()) for side in sides)
    if apart is None or mean_a is None or mean_b is None:
        return None
    unit = "folds" if not by_seed and len(places) > 1 else "seeds"
    return Comparison(*names, goal.metric, goal.mode, mean_a, mean_b, apart, unit)


def as_values(found: Comparison) -> dict[str, Any]:
    """For programs."""
    return {**asdict(found), "verdict": found.verdict}


def words_of(found: Comparison) -> str:
    """better; worse; undecided: about 9 more seeds, or folds."""
    if found.difference.is_decided:
        return found.verdict
    more = found.difference.more_seeds
    unit = found.unit.removesuffix("s") if more == 1 else found.unit
    return (
        f"undecided: about {more:,} more {unit}" if more else f"undecided: no difference that {found.unit} would show"
    )


def _mean(values: Any) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
