"""Runs both sides of a try as one sweep: the seeds that a look asks for, look by look, until it is decided or the time is up.

For tools/try_out.py; tries.py says which seeds a look needs. A side is a configuration and what is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import DictConfig

from runner.sweep.jobs.ledger import Sweep
from runner.sweep.jobs.prepare import Prepared, name_of
from runner.sweep.report.ranking import Goal
from runner.sweep.report.results import read_results
from runner.sweep.sweep import Hands, Plan, run_sweep
from runner.sweep.tries import Decision
from runner.sweep.until import Rounds, add_jobs

Words = tuple[str, ...]


@dataclass
class Side:
    """One of the two that are compared."""

    name: str  # try N, or a run's folder
    flags: list[str]  # of the command line, that find its file
    words: list[str]
    goal: Goal
    code: Mapping[str, Any]
    values: dict[int, float] = field(default_factory=dict)  # by seed
    may_add: bool = True  # its code lies here, so that more seeds can be measured
    failed: str = ""  # why a run of it has no value
    lost: set[int] = field(default_factory=set)  # the seeds of such runs

    def jobs(self, seeds: Sequence[int]) -> list[Words]:
        """Of the seeds that are not known yet, where they may be run."""
        return [(*self.words, f"seed={seed}") for seed in seeds if self.may_add and seed not in self.values]


def measure(
    sides: Sequence[Side], look: Callable[[bool], Decision | list[int]], context: Any, config: DictConfig
) -> Decision:
    """Runs what looks ask for, fills in the sides' values, and returns the last look's decision.

    look: given whether it is the last one. Raises: RunnerError for mistakes; SystemExit when it was stopped.
    """
    found = look(False)
    if isinstance(found, Decision):
        return found
    owners: list[Side] = []  # of the jobs, by their numbers
    jobs = _jobs(sides, found, owners)
    if not jobs:
        return _last(look)
    swept = {word.partition("=")[0] for words in jobs for word in set(words) ^ set(jobs[0])} | {"seed"}
    listed = [(words, name_of(words, swept)) for words in jobs]
    given = tuple(sides[0].words)

    def more(hands: Hands) -> list[Prepared]:
        before = _num_told(sides)
        note(hands.sweep, owners)
        found = look(False)
        if isinstance(found, Decision) or sides[0].failed or _num_told(sides) == before:
            return []  # the last: a queue's time was over for each of them, and would be once more
        return add_jobs(hands, _jobs(sides, found, owners), swept)

    plan = Plan(given, listed, lambda hands: Rounds(hands, partial(more, hands)), adds_seeds=True)
    note(run_sweep(plan, context, config), owners)
    return _last(look)


def _last(look: Callable[[bool], Decision | list[int]]) -> Decision:
    found = look(True)
    assert isinstance(found, Decision)
    return found


def _jobs(sides: Sequence[Side], seeds: Sequence[int], owners: list[Side]) -> list[Words]:
    found = []
    for side in sides:
        new = side.jobs(seeds)
        owners += [side] * len(new)
        found += new
    return found


def _num_told(sides: Sequence[Side]) -> int:
    return sum(len(side.values) + len(side.lost) for side in sides)


def note(sweep: Sweep, owners: Sequence[Side]) -> None:
    """Fills in what the sweep's jobs have reached, and why one has no value."""
    for result in read_results(sweep):
        side = owners[result.job]
        value = result.value(side.goal.metric)
        if result.state == "finished" and value is not None:
            side.values[result.seed] = value
        elif result.state in ("finished", "failed", "killed"):
            side.lost.add(result.seed)
            side.failed = side.failed or f"seed {result.seed}: {result.error or f'it has no {side.goal.metric}'}"
