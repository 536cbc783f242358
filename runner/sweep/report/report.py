"""The report of a sweep as plain values, for the text, the files, the page and the sweep's run in MLflow."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from runner.errors import without_password
from runner.sweep.jobs import ledger
from runner.sweep.report.comparisons import (
    Comparison,
    Seeds,
    against_best,
    configurations,
    in_words,
    num_looks,
    over_seeds,
)
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
        found = Counter(result.state for result in self.results)
        return {state: found[state] for state in sorted(found, key=lambda state: (RANK.get(state, 2), state))}

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
        return differing_keys(sorted(self.results, key=lambda result: result.job))

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
