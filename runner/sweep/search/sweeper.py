"""The sweeper with Optuna (hydra/sweeper=optuna): run a search over the overrides of `-m`.

It reads and checks the settings; space.py reads the dimensions, study.py makes the sampler and the pruner, job_source.py the jobs.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config.packages import not_installed
from runner.config.schema import SearchKeys
from runner.config.validate import setting_problems, written
from runner.errors import Problem, RunnerError, refuse
from runner.sweep.search.job_source import Suggestions
from runner.sweep.search.objectives import Goals, goal_problems, kept_by, read_goals
from runner.sweep.search.space import Choices, Space, read_space
from runner.sweep.search.study import Pruning
from runner.sweep.sweep import Plan, run_sweep

KEY = "hydra.sweeper"
BY_NUMBER = "${hydra.job.num}"
#: keys by which jobs differ randomly
CHANCE = ("seed", "data.fold")


class Search:
    """Runs the trials that an Optuna study suggests, as many at a time as there are slots."""

    def __init__(self, **settings: Any) -> None:
        """settings: Not used here: they are read from the composed configuration."""

    def sweep(self, arguments: list[str], context: Any, config: DictConfig) -> Any:
        """Raises: RunnerError with all problems of the settings and the space."""
        return run_sweep(self._plan(arguments, context, config), context, config)

    def _plan(self, arguments: list[str], context: Any, config: DictConfig) -> Plan:
        settings = read_settings(config.hydra.sweeper)
        goals, problems = read_goals(settings.metric, settings.direction)
        if config.sweep.until:
            problem = "a search tries each combination once"
            problems.append(Problem("sweep.until=decided", problem, "use `sweep.until=null`, or `hydra/sweeper=grid`"))
        if config.sweep.zip:
            problem = "a search chooses each key's value independently"
            problems.append(Problem("sweep.zip", problem, "use `KEY=VALUE1,VALUE2`, or `hydra/sweeper=grid`"))
        try:
            space = read_space(arguments, context.config_loader, more=settings.params)
        except RunnerError as error:
            raise RunnerError(*problems, *error.problems) from None
        problems += goal_problems(goals, config, space.dimensions)
        subdir = written(config.hydra.sweep, "subdir")
        if subdir != BY_NUMBER:
            problem, way = "a search names its directories by the trials' numbers", f"hydra.sweep.subdir='{BY_NUMBER}'"
            problems.append(Problem.suggest(f"hydra.sweep.subdir={subdir}", problem, [way]))
        problems += _sampler_problems(settings, space, goals)
        pruning, why, of_pruner = choose_pruning(settings, goals)
        problems += of_pruner + _missing_packages(settings)
        refuse(problems)
        space = Space((*kept_by(goals, config), *space.fixed), space.dimensions)
        return Plan(
            tuple(arguments),
            [(space.overrides(values), space.name(values)) for values in space.corners()],
            lambda context: Suggestions(context, space, goals, settings, pruning),
            objectives=goals,
            says=_lines(settings, space, goals, pruning, why),
            imports=("runner.sweep.search.preload",) if pruning else (),
        )


def read_settings(node: DictConfig) -> SearchKeys:
    """Return the sweeper's settings. Raises: RunnerError with all their problems."""
    problems = setting_problems(node, SearchKeys, KEY)
    if node.get("metric", "") is None:
        problems.append(Problem.suggest(f"{KEY}.metric=null", "a search needs a metric", [f"{KEY}.metric=val/loss"]))
    refuse(problems)
    values: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    return SearchKeys(**{name: value for name, value in values.items() if name != "_target_"})


def choose_pruning(settings: SearchKeys, goals: Goals) -> tuple[Pruning | None, str, list[Problem]]:
    """Return the settings of the pruner (None: no pruner), the reason for an automatic one, and a problem of the setting."""
    metric = goals[0]["metric"]
    if settings.pruner in ("none", None):
        return None, "", []
    if len(goals) == 1 and metric.startswith(("train/", "val/")):
        return Pruning(settings.warmup_epochs, settings.startup_trials), "", []
    why = "pruning needs a single metric" if len(goals) > 1 else f"no epoch reports `{metric}`"
    if settings.pruner == "auto":
        return None, why, []
    fix = f"use `{KEY}.pruner=none`, or `{KEY}.metric=val/loss`"
    return None, "", [Problem(f"{KEY}.pruner={settings.pruner}", why, fix)]


def _sampler_problems(settings: SearchKeys, space: Space, goals: Goals) -> list[Problem]:
    source, dimensions = f"{KEY}.sampler={settings.sampler}", space.dimensions
    if settings.sampler == "grid":
        endless = [key for key, dimension in dimensions.items() if dimension.listed() is None]
        fix = f"use `{KEY}.sampler=random` or `tpe`, or `{{}}=0.001,0.01,0.1`"
        return [Problem(source, f"`{key}` is an interval, and a grid needs values", fix.format(key)) for key in endless]
    if settings.sampler != "cmaes":
        return []
    problems = []
    numbers = [key for key, dimension in dimensions.items() if not isinstance(dimension, Choices)]
    if len(numbers) < 2:
        problem = f"CMA-ES needs two or more numbers, and of {', '.join(dimensions)} only {', '.join(numbers) or 'none'} is one"
        problems.append(Problem.suggest(source, problem, [f"{KEY}.sampler=tpe"]))
    if len(goals) > 1:
        ways = [f"{KEY}.sampler=nsga2", f"{KEY}.sampler=tpe"]
        problems.append(Problem.suggest(source, "CMA-ES needs a single metric", ways))
    return problems


def _missing_packages(settings: SearchKeys) -> list[Problem]:
    needed = ["optuna", *(["cmaes"] if settings.sampler == "cmaes" else [])]
    missing = [name for name in needed if find_spec(name) is None]
    source = f"hydra/sweeper=optuna, sampler={settings.sampler}"
    return [not_installed(source, f"the package `{name}` is not installed", "search").problems[0] for name in missing]


def _lines(
    settings: SearchKeys, space: Space, goals: Goals, pruning: Pruning | None, why: str
) -> list[tuple[str, str]]:
    trials, pruner = f"{settings.n_trials} trials", f"none ({why})" if why else "none"
    if settings.sampler == "grid":
        count = math.prod(len(dimension.listed() or []) for dimension in space.dimensions.values())
        trials = f"{min(count, settings.n_trials)} of {count} combinations"
    if pruning is not None:
        after = f"after {pruning.warmup_epochs} epochs, once {pruning.startup_trials} trials have run to their end"
        pruner = f"median, {after}"
    width = max(map(len, space.dimensions))
    dimensions = [f"{key:<{width}}  {dimension}" for key, dimension in space.dimensions.items()]
    note = (
        "{key} is a dimension like the others: each trial has one, and the best may be so only by its {key}; "
        "for several of each, a grid: -m with the best trial's words and {key}=...,..."
    )
    return [
        ("search", f"{settings.sampler}, {trials}, seed {settings.seed}"),
        ("goal", ", ".join(f"{goal['direction']} {goal['metric']}" for goal in goals)),
        ("pruner", pruner),
        ("space", f"\n{'':8}".join(dimensions)),
        *(("note", note.format(key=key)) for key in CHANCE if key in space.dimensions),
    ]
