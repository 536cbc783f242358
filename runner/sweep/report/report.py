"""The report as plain values, which the text, the files, the page and the sweep's run in MLflow all show."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from runner.sweep.report.comparisons import Comparison
from runner.sweep.report.ranking import FAILURES, GOOD, RANK, Goal
from runner.sweep.report.results import Result, differing_keys
from runner.sweep.report.seeds import Seeds, in_words


@dataclass
class Report:
    """What a sweep's jobs reached, as plain values; the same for the same folder."""

    folder: Path
    uid: str
    began_ms: int
    overrides: tuple[str, ...]  # the words of the command line
    objectives: tuple[dict[str, str], ...]  # of a search; of a grid: empty
    goals: tuple[Goal, ...]  # what the order follows, also of a grid; empty: no job measured anything
    results: list[Result]  # best first
    front: tuple[int, ...] = ()  # of two goals or more: the jobs on the Pareto front, by number
    seeds: list[Seeds] = field(default_factory=list)  # empty: no group has two seeds, or two folds
    comparisons: list[Comparison] = field(default_factory=list)  # the best of those groups beside each other one
    importance: dict[str, float] = field(default_factory=dict)  # of a search: shares by key, the largest first

    @property
    def counts(self) -> dict[str, int]:
        """How many jobs ended in which state, in the order of the table."""
        found = Counter(result.state for result in self.results)
        return {state: found[state] for state in sorted(found, key=lambda state: (RANK.get(state, 2), state))}

    @property
    def exit_code(self) -> int:
        """The sweep's own: 1 when a job failed or was killed, or is not at its end, else 0; a skipped one is no failure."""
        return int(any(each.state not in GOOD for each in self.results))

    @property
    def failures(self) -> list[Result]:
        return sorted((each for each in self.results if each.state in FAILURES), key=lambda each: each.job)

    @property
    def skipped(self) -> list[Result]:
        return [each for each in self.results if each.state == "skipped"]

    @property
    def best(self) -> Result | None:
        """The first of the table, if it finished with a value."""
        first = self.results[0] if self.results else None
        if first is None or first.state != "finished" or not self.goals:
            return None
        return first if first.value(self.goals[0].metric) is not None else None

    @property
    def over(self) -> str:
        """What the means of the groups are taken over: seeds, folds, seeds and folds."""
        return in_words(self.seeds)

    @property
    def winner(self) -> str | None:
        """The group of seeds that is better than each other one, and not by chance."""
        verdicts = {each.verdict for each in self.comparisons}
        return self.comparisons[0].a if verdicts == {"better"} else None

    @property
    def keys(self) -> list[str]:
        """The keys that set the jobs apart."""
        return differing_keys(sorted(self.results, key=lambda result: result.job))

    @property
    def command(self) -> str:
        """The line that made the sweep."""
        return f"python -m runner -m {shlex.join(self.overrides)}".strip()
