"""Hydra's sweeper on Optuna (hydra/sweeper=optuna): has a search over the words of `-m` run, by sweep.py.

It reads and checks the settings; the sampler and the pruner are made in study.py, the jobs in job_source.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.packages import install
from runner.config.schema import Search as Settings
from runner.config.validate import setting_faults, written
from runner.errors import Fault, RunnerError, refuse
from runner.sweep.search.job_source import Suggestions
from runner.sweep.search.objectives import Goals, goal_faults, kept_by, read_goals
from runner.sweep.search.space import Choices, Space, listed
from runner.sweep.search.space_parser import read_space
from runner.sweep.search.study import Pruning
from runner.sweep.sweep import Plan, run_sweep

KEY = "hydra.sweeper"
BY_NUMBER = "${hydra.job.num}"
#: what others differ in by chance
CHANCE = ("seed", "data.fold")


class Search(Sweeper):
    """Trials that a study of Optuna's suggests, as many at a time as there are places for."""

    def __init__(self, **settings: Any) -> None:
        """settings: they are read, and checked, where the configuration is whole."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def sweep(self, arguments: list[str]) -> Any:
        return run_sweep(self._plan(arguments), self._context, self._config)

    def _plan(self, arguments: list[str]) -> Plan:
        """Raises: RunnerError with everything that is wrong with the settings and the space."""
        settings = read_settings(self._config.hydra.sweeper)
        faults: list[Fault] = []
        goals, found = read_goals(settings.metric, settings.direction)
        faults += found
        if self._config.sweep.until:
            problem = "a search tries each combination once"
            faults.append(Fault("sweep.until=decided", problem, "sweep.until=null, or hydra/sweeper=grid"))
        if self._config.sweep.zip:
            problem = "a search asks for each key's value by itself"
            faults.append(Fault("sweep.zip", problem, "KEY=VALUE1,VALUE2, or hydra/sweeper=grid"))
        try:
            space = read_space(arguments, self._context.config_loader, more=settings.params)
        except RunnerError as error:
            raise RunnerError(*faults, *error.faults) from None
        faults += goal_faults(goals, self._config, space.dimensions)
        subdir = written(self._config.hydra.sweep, "subdir")
        if subdir != BY_NUMBER:
            problem = "a search's folders have its trials' numbers"
            faults.append(Fault(f"hydra.sweep.subdir={subdir}", problem, f"hydra.sweep.subdir='{BY_NUMBER}'"))
        faults += _sampler_faults(settings, space, goals)
        kind, why, found = choose_pruner(settings.pruner, goals)
        faults += found + _missing_packages(settings)
        refuse(faults)
        space = Space((*kept_by(goals, self._config), *space.fixed), space.dimensions)
        pruning = None
        if kind is not None:
            num_epochs = _num_epochs(self._config, space)
            pruning = Pruning(kind, settings.warmup_epochs, settings.startup_trials, num_epochs)
        return Plan(
            tuple(arguments),
            [(space.overrides(values), space.name(values)) for values in space.corners()],
            lambda hands: Suggestions(hands, space, goals, settings, pruning),
            objectives=goals,
            says=_lines(settings, space, goals, pruning, why),
            imports=("runner.sweep.search.preload",) if pruning else (),
        )


def read_settings(node: DictConfig) -> Settings:
    """The sweeper's settings. Raises: RunnerError with everything that is wrong with them as they stand."""
    faults = setting_faults(node, Settings, KEY)
    if node.get("metric", "") is None:
        faults.append(Fault(f"{KEY}.metric=null", "a search needs something to search for", f"{KEY}.metric=val/loss"))
    refuse(faults)
    values: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    return Settings(**{name: value for name, value in values.items() if name != "_target_"})


def choose_pruner(asked: str | None, goals: Goals) -> tuple[str | None, str, list[Fault]]:
    """The pruner's kind (None: none) with the reason for an automatic one, and what is wrong with what was asked."""
    metric = goals[0]["metric"]
    if len(goals) > 1:
        why = "several metrics have no order to prune by"
    elif not metric.startswith(("train/", "val/")):
        why = f"no epoch has {metric}"
    elif asked == "auto":
        return "median", "", []
    else:
        return (None if asked in (None, "none") else asked), "", []
    if asked in ("auto", "none", None):
        return None, why if asked == "auto" else "", []
    fix = f"{KEY}.pruner=none, or {KEY}.metric=val/loss"
    return None, "", [Fault(f"{KEY}.pruner={asked}", why, fix)]


def _sampler_faults(settings: Settings, space: Space, goals: Goals) -> list[Fault]:
    asked = f"{KEY}.sampler={settings.sampler}"
    dimensions = space.dimensions
    if settings.sampler == "grid":
        endless = [key for key, dimension in dimensions.items() if listed(dimension) is None]
        fix = f"{KEY}.sampler=random or tpe, or {{}}=0.001,0.01,0.1"
        return [Fault(asked, f"{key} is an interval, and a grid needs values", fix.format(key)) for key in endless]
    if settings.sampler != "cmaes":
        return []
    faults = []
    numbers = [key for key, dimension in dimensions.items() if not isinstance(dimension, Choices)]
    if len(numbers) < 2:
        problem = (
            f"CMA-ES works on two numbers or more; of {', '.join(dimensions)}, {', '.join(numbers) or 'none'} is one"
        )
        faults.append(Fault(asked, problem, f"{KEY}.sampler=tpe"))
    if len(goals) > 1:
        faults.append(Fault(asked, "CMA-ES has one goal", f"{KEY}.sampler=nsga2 or {KEY}.sampler=tpe"))
    return faults


def _missing_packages(settings: Settings) -> list[Fault]:
    needed = ["optuna", *(["cmaes"] if settings.sampler == "cmaes" else [])]
    missing = [name for name in needed if find_spec(name) is None]
    asked = f"hydra/sweeper=optuna, sampler={settings.sampler}"
    return [Fault(asked, f"the package {name} is not installed", install("search")) for name in missing]


def _num_epochs(config: DictConfig, space: Space) -> int | None:
    if config.train.num_steps is not None or config.train.evaluate_every_steps is not None:
        return None
    if {"train.num_steps", "train.num_epochs"} & set(space.dimensions):
        return None
    return int(config.train.num_epochs)


def _lines(
    settings: Settings, space: Space, goals: Goals, pruning: Pruning | None, why: str
) -> Sequence[tuple[str, str]]:
    trials = f"{settings.n_trials} trials"
    combinations = [listed(dimension) for dimension in space.dimensions.values()]
    if settings.sampler == "grid":
        count = 1
        for values in combinations:
            count *= len(values or [])
        trials = f"{min(count, settings.n_trials)} of {count} combinations"
    lines = [
        ("search", f"{settings.sampler}, {trials}, seed {settings.seed}"),
        ("goal", ", ".join(f"{goal['direction']} {goal['metric']}" for goal in goals)),
    ]
    if pruning is None:
        lines.append(("pruner", f"none ({why})" if why else "none"))
    else:
        after = f"after {pruning.warmup_epochs} epochs, once {pruning.startup_trials} trials have run to their end"
        lines.append(("pruner", f"{pruning.kind}, {after}"))
    width = max(map(len, space.dimensions))
    dimensions = [f"{key:<{width}}  {dimension}" for key, dimension in space.dimensions.items()]
    notes = [
        (
            "note",
            f"{key} is a dimension like the others: each trial has one, and the best may be so by its {key} alone; "
            f"for several of each, a grid: -m with the best trial's words and {key}=...,...",
        )
        for key in CHANCE
        if key in space.dimensions
    ]
    return [*lines, ("space", f"\n{'':8}".join(dimensions)), *notes]
