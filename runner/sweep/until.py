"""sweep.until=decided: add seeds of each configuration to a grid until the best one is decided, up to sweep.max_seeds.

It compares after 8, 16, 32, ... seeds. As the looks are fixed in advance, all of them together name a wrong winner in at most
5 % of sweeps (Bonferroni over looks and pairs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from runner.errors import Problem, RunnerError
from runner.experiment.summary import Summary
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import (
    SEED,
    PreparedJob,
    Words,
    configurations,
    folder_problems,
    name_of,
    used_problems,
    without,
)
from runner.sweep.report.comparisons import against_best, looks, num_looks, words_of
from runner.sweep.report.comparisons import configurations as by_configuration
from runner.sweep.report.results import find_goals, read_results

if TYPE_CHECKING:
    from runner.sweep.sweep import SweepContext

SEED_AND_FOLD = (*SEED, "data.fold")


def check(jobs: Sequence[tuple[Words, str]], settings: DictConfig) -> None:
    """Check `config.sweep`. Raises: RunnerError if there is nothing to decide, or too few seeds for a look."""
    found, asked = {without(SEED_AND_FOLD, overrides) for overrides, _ in jobs}, "sweep.until=decided"
    problems = []
    if len(found) < 2:
        fix = "add, e.g., `model=mlp,cnn`, or use `seed='range(8)'` without it"
        alone = "seeds and folds" if len(configurations(jobs)) > 1 else "seeds"
        problems.append(
            Problem(
                asked,
                f"`sweep.until=decided` compares configurations, and these jobs differ only in their {alone}",
                fix,
            )
        )
    if settings.max_seeds < looks(settings.max_seeds)[0]:
        problem = f"{settings.max_seeds} seeds per configuration are too few to decide anything"
        problems.append(Problem.suggest(f"sweep.max_seeds={settings.max_seeds}", problem, ["sweep.max_seeds=32"]))
    if problems:
        raise RunnerError(*problems)


class Rounds:
    """A scheduler.JobSource of rounds: the jobs of the next round follow when all of a round have ended."""

    def __init__(self, context: SweepContext, more: Callable[[], list[PreparedJob]]) -> None:
        """more: Returns the next round's jobs, added by add_jobs(); [] ends the sweep."""
        self._left, self._more = deque(context.prepared), more
        self._running: set[int] = set()
        self._is_over = False

    def next(self, num_waiting: int) -> PreparedJob | None:
        if not self._left and not self._running and not num_waiting and not self._is_over:
            self._left.extend(self._more())
            self._is_over = not self._left
        if not self._left:
            return None
        prepared = self._left.popleft()
        self._running |= {job.number for job in prepared.jobs}
        return prepared

    def ended(self, job: Job, summary: Summary) -> None:
        self._running.discard(job.number)


def until_decided(context: SweepContext, jobs: Sequence[tuple[Words, str]]) -> Rounds:
    """Return a source of the jobs, and more seeds of each configuration until the best one is decided."""
    return Rounds(context, _Looks(context, configurations(jobs)).more)


class _Looks:
    def __init__(self, context: SweepContext, found: list[Words]) -> None:
        self._context, self._configurations = context, found
        self._apart = {word.partition("=")[0] for other in found for word in set(other) ^ {*found[0]}} | {"seed"}
        sweep = context.sweep
        if (most := max(context.config.sweep.max_seeds, sweep.max_seeds or 0)) != sweep.max_seeds:
            sweep.max_seeds = most
            context.ledger.note_max_seeds(most)
        self._looks = looks(context.config.sweep.max_seeds)

    def more(self) -> list[PreparedJob]:
        """Compare the configurations and print the result; if undecided, add seeds up to the next look."""
        self._leave_out_skipped()
        if len({without(SEED_AND_FOLD, words) for words in self._configurations}) < 2:
            self._context.say("until:  nothing to decide: all but one were skipped")
            return []
        tried = self._seeds_tried()
        wanted = next((size for size in self._looks if size > tried), None)
        if tried in self._looks or wanted is None:
            results = read_results(self._context.sweep)
            goals = find_goals((), results)
            groups = by_configuration(results)
            found = against_best(groups, goals[0], num_looks=num_looks(self._context.sweep.max_seeds)) if goals else []
            for each in found:
                self._context.say(f"until:  {tried} seeds: {each.a} compared with {each.b}: {words_of(each)}")
            if found and all(each.verdict == "better" for each in found):
                return []
            if not found or wanted is None:
                why = "as many as it may be" if found else "no two configurations have a value to compare"
                self._context.say(f"until:  undecided with {tried} seeds of each, {why}")
                return []
        return [] if wanted is None else self._add(wanted)

    def _leave_out_skipped(self) -> None:
        skipped = {without(SEED, job.overrides) for job in self._context.sweep.jobs.values() if job.state == "skipped"}
        self._configurations = [words for words in self._configurations if words not in skipped]

    def _seeds_tried(self) -> int:
        tried = [0] * len(self._configurations)
        for job in self._context.sweep.jobs.values():
            if (words := without(SEED, job.overrides)) in self._configurations:
                tried[self._configurations.index(words)] += 1
        return min(tried)

    def _add(self, wanted: int) -> list[PreparedJob]:
        taken = {each.seed for each in read_results(self._context.sweep)}
        first = max(taken, default=-1) + 1
        new = range(first, first + wanted - self._seeds_tried())
        jobs = [(*words, f"seed={seed}") for seed in new for words in self._configurations]
        added = add_jobs(self._context, jobs, self._apart)
        self._context.say(f"until:  {len(new)} more seeds of each, {len(jobs)} jobs")
        return added


def add_jobs(context: SweepContext, jobs: Sequence[Words], swept: set[str]) -> list[PreparedJob]:
    """Add jobs to the ledger of a running sweep, and return them in groups for training together.

    Args:
        swept: The keys in which they differ.

    Raises:
        RunnerError: If a directory is in use; nothing is added then.
    """
    prepared = []
    for overrides in jobs:
        job = Job(max(context.sweep.jobs) + 1, overrides, name_of(overrides, swept))
        context.sweep.jobs[job.number] = job
        prepared.append(context.prepare(job))  # names its folder
    every, new = list(context.sweep.jobs.values()), [context.sweep.folder_of(each.job) for each in prepared]
    if problems := folder_problems(every) or used_problems(
        new
    ):  # hydra.sweep.subdir changed since the sweep was started
        raise RunnerError(*problems)
    context.ledger.plan(*(each.job for each in prepared))
    return context.in_groups(prepared)
