"""The sweeper for grids (hydra/sweeper=grid): run every combination of the values in the overrides.

With sweep.until=decided, add seeds of each configuration until the best one is decided, up to sweep.max_seeds. It compares after
8, 16, 32, ... seeds. As the looks are fixed in advance, all of them together name a wrong winner in at most 5 % of sweeps
(Bonferroni over looks and pairs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from runner.errors import Problem, refuse
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import (
    SEED,
    Overrides,
    PreparedJob,
    combinations,
    configurations,
    folder_problems,
    grid_params,
    name_of,
    used_problems,
    without,
    zip_of,
)
from runner.sweep.report.report import against_best, looks, num_looks, words_of
from runner.sweep.report.report import configurations as by_configuration
from runner.sweep.report.results import find_goals, read_results
from runner.sweep.scheduler import Rounds
from runner.sweep.sweep import Plan, SweepContext, run_sweep

SEED_AND_FOLD = (*SEED, "data.fold")


class Grid:
    """Runs all combinations, in the order of the overrides."""

    def __init__(self, **settings: Any) -> None:
        """settings: Not used here: they are read from the composed configuration."""

    def sweep(self, arguments: list[str], context: Any, config: DictConfig) -> Any:
        params, zipped = grid_params(config), zip_of(config)
        jobs = combinations(arguments, context.config_loader, params=params, zipped=zipped)
        if config.sweep.until is None:
            return run_sweep(Plan(tuple(arguments), jobs, lambda each: Rounds(each.prepared)), context, config)
        check(jobs, config.sweep)
        plan = Plan(tuple(arguments), jobs, lambda each: until_decided(each, jobs), adds_seeds=True)
        return run_sweep(plan, context, config)


def check(jobs: Sequence[tuple[Overrides, str]], settings: DictConfig) -> None:
    """Check `config.sweep`. Raises: RunnerError if there is nothing to decide, or too few seeds for a look."""
    problems = []
    if len({without(SEED_AND_FOLD, overrides) for overrides, _ in jobs}) < 2:
        fix = "add, e.g., `model=mlp,cnn`, or use `seed='range(8)'` without it"
        alone = "seeds and folds" if len(configurations(jobs)) > 1 else "seeds"
        problem = f"`sweep.until=decided` compares configurations, and these jobs differ only in their {alone}"
        problems.append(Problem("sweep.until=decided", problem, fix))
    if settings.max_seeds < looks(settings.max_seeds)[0]:
        problem = f"{settings.max_seeds} seeds per configuration are too few to decide anything"
        problems.append(Problem.suggest(f"sweep.max_seeds={settings.max_seeds}", problem, ["sweep.max_seeds=32"]))
    refuse(problems)


def until_decided(context: SweepContext, jobs: Sequence[tuple[Overrides, str]]) -> Rounds:
    """Return a source of the jobs, and more seeds of each configuration until the best one is decided."""
    return Rounds(context.prepared, _Looks(context, configurations(jobs)).more)


class _Looks:
    def __init__(self, context: SweepContext, each: list[Overrides]) -> None:
        self._context, self._configurations = context, each
        self._swept = {text.partition("=")[0] for other in each for text in {*other} ^ {*each[0]}} | {"seed"}
        sweep = context.sweep
        if (most := max(context.config.sweep.max_seeds, sweep.max_seeds or 0)) != sweep.max_seeds:
            sweep.max_seeds = most
            context.ledger.note_max_seeds(most)
        self._looks = looks(context.config.sweep.max_seeds)

    def more(self) -> list[PreparedJob]:
        """Compare the configurations and print the result; if undecided, add seeds up to the next look."""
        self._leave_out_skipped()
        if len({without(SEED_AND_FOLD, overrides) for overrides in self._configurations}) < 2:
            self._context.say("until:  nothing to decide: all but one were skipped")
            return []
        tried = self._seeds_tried()
        target = next((size for size in self._looks if size > tried), None)
        if tried in self._looks or target is None:
            results = read_results(self._context.sweep)
            goals = find_goals((), results)
            count = num_looks(self._context.sweep.max_seeds)
            comparisons = against_best(by_configuration(results), goals[0], num_looks=count) if goals else []
            for each in comparisons:
                self._context.say(f"until:  {tried} seeds: {each.a} compared with {each.b}: {words_of(each)}")
            if comparisons and all(each.verdict == "better" for each in comparisons):
                return []
            if not comparisons or target is None:
                why = "as many as it may be" if comparisons else "no two configurations have a value to compare"
                self._context.say(f"until:  undecided with {tried} seeds of each, {why}")
                return []
        return [] if target is None else self._add(target)

    def _leave_out_skipped(self) -> None:
        skipped = {without(SEED, job.overrides) for job in self._context.sweep.jobs.values() if job.state == "skipped"}
        self._configurations = [each for each in self._configurations if each not in skipped]

    def _seeds_tried(self) -> int:
        tried = [0] * len(self._configurations)
        for job in self._context.sweep.jobs.values():
            if (overrides := without(SEED, job.overrides)) in self._configurations:
                tried[self._configurations.index(overrides)] += 1
        return min(tried)

    def _add(self, target: int) -> list[PreparedJob]:
        first = max((each.seed for each in read_results(self._context.sweep)), default=-1) + 1
        new = range(first, first + target - self._seeds_tried())
        jobs = [(*overrides, f"seed={seed}") for seed in new for overrides in self._configurations]
        added = add_jobs(self._context, jobs, self._swept)
        self._context.say(f"until:  {len(new)} more seeds of each, {len(jobs)} jobs")
        return added


def add_jobs(context: SweepContext, jobs: Sequence[Overrides], swept: set[str]) -> list[PreparedJob]:
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
    # hydra.sweep.subdir may have changed since the sweep was started
    refuse(folder_problems(every) or used_problems(new))
    context.ledger.plan(*(each.job for each in prepared))
    return context.in_groups(prepared)
