"""What a sweep's jobs are judged by, and their order, best first. The report and the sweep's run in MLflow go by it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runner.sweep.report.results import Result

#: states that share a number stand together
RANK = {
    "finished": 0,
    "pruned": 1,
    "running": 2,
    "interrupted": 2,
    "planned": 2,
    "skipped": 3,
    "failed": 4,
    "killed": 4,
}
FAILURES = ("failed", "killed")
#: of a job that leaves nothing to do
GOOD = ("finished", "pruned", "skipped")


@dataclass(frozen=True)
class Goal:
    """What the jobs are judged by."""

    metric: str
    mode: str  # min | max


def find_goals(objectives: Sequence[dict[str, str]], results: Sequence[Result]) -> tuple[Goal, ...]:
    """A search's objectives; else the metric that most jobs kept their best by; () when none did."""
    if objectives:
        return tuple(Goal(each["metric"], each["direction"][:3]) for each in objectives)
    kept = Counter((result.best.metric, result.best.mode) for result in results if result.best)
    return (Goal(*kept.most_common(1)[0][0]),) if kept else ()


def best_first(results: Sequence[Result], goals: Sequence[Goal]) -> list[Result]:
    """By state as in RANK; within it those on the Pareto front first, then by the goals, then by number."""
    front = find_front(results, goals)

    def key(result: Result) -> tuple[object, ...]:
        costs = _costs(result, goals)
        known = [math.inf if cost is None else cost for cost in costs]
        return (RANK.get(result.state, 2), result.job not in front, None in costs, known, result.job)

    return sorted(results, key=key)


def find_front(results: Sequence[Result], goals: Sequence[Goal]) -> set[int]:
    """Of two goals or more: the finished jobs that no other finished one beats. Quadratic in the jobs."""
    if len(goals) < 2:
        return set()
    costs = {result.job: _costs(result, goals) for result in results if result.state == "finished"}
    whole = {job: [value for value in cost if value is not None] for job, cost in costs.items() if None not in cost}

    def beats(one: list[float], other: list[float]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return {job for job, cost in whole.items() if not any(beats(other, cost) for other in whole.values())}


def _costs(result: Result, goals: Sequence[Goal]) -> list[float | None]:
    """The goals' values so that less is better; what is infinite is the worst, whatever its sign."""
    values = [(goal.mode, result.value(goal.metric)) for goal in goals]
    signed = [value if value is None or mode == "min" else -value for mode, value in values]
    return [math.inf if value is not None and math.isinf(value) else value for value in signed]
