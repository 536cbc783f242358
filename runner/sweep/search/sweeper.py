"""The sweeper with Optuna (hydra/sweeper=optuna): run a search over the overrides of `-m`.

It reads and checks the settings; space.py reads the dimensions, study.py makes the sampler and the pruner, job_source.py the jobs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config.identity import as_text
from runner.config.packages import not_installed
from runner.config.schema import SearchKeys
from runner.config.validate import setting_problems, written
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.sweep.search.job_source import Goals, Suggestions
from runner.sweep.search.space import Space, read_space
from runner.sweep.search.study import Pruning
from runner.sweep.sweep import Plan, run_sweep
from runner.tasks.metric_names import REPORTED, is_of_a_class, is_rising, metrics_of

KEY = "hydra.sweeper"
BY_NUMBER = "${hydra.job.num}"
SPLITS = ("train", "val", "test")
#: data sets without their own val or test split
WITHOUT_SPLITS = ("runner.data.digits", "runner.data.synthetic")
SPEEDS = ("speed/samples_per_second", "speed/steps_per_second")


class Search:
    """Runs the trials that an Optuna study suggests, as many at a time as there are slots."""

    def __init__(self, **settings: Any) -> None:
        """settings: Not used here: they are read from the composed configuration."""

    def sweep(self, arguments: list[str], context: Any, config: DictConfig) -> Any:
        """Raises: RunnerError with all problems of the settings and the space."""
        return run_sweep(self._plan(arguments, context, config), context, config)

    def _plan(self, arguments: list[str], context: Any, config: DictConfig) -> Plan:
        settings = read_settings(config.hydra.sweeper)
        refuse(_missing_packages(settings))  # space.py imports them
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
        problems += of_pruner
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


def read_goals(metric: Any, direction: Any) -> tuple[Goals, list[Problem]]:
    """Return the objectives and their problems; a missing direction follows from the metric's name."""
    metrics = [metric] if isinstance(metric, str) else list(metric)
    usual = ["maximize" if is_rising(name) else "minimize" for name in metrics]
    directions = [direction] if isinstance(direction, str) else direction
    directions = [None] * len(metrics) if directions is None else directions
    problems = []
    if len(directions) != len(metrics):
        problem = f"there are {len(metrics)} metrics ({', '.join(metrics)}) and {len(directions)} directions"
        fix = f"use `hydra.sweeper.direction={_listed(usual)}`, or null"
        problems.append(Problem(f"hydra.sweeper.direction={_listed(directions)}", problem, fix))
        directions = usual
    for name in {name for name in metrics if metrics.count(name) > 1}:
        source = f"hydra.sweeper.metric={_listed(metrics)}"
        problems.append(Problem(source, f"`{name}` is listed twice", f"name `{name}` once"))
    each = zip(metrics, directions, usual, strict=True)
    return tuple({"metric": name, "direction": way or default} for name, way, default in each), problems


def goal_problems(goals: Goals, config: Any, swept: Collection[str]) -> list[Problem]:
    """Return the metrics that no job has. config: Common to all jobs. swept: The keys that differ between them."""
    task, data = (None if key in swept else str(config[key].get("_target_")) for key in ("task", "data"))
    reported = None if any(key.startswith("task.") for key in swept) else REPORTED.get(str(task))
    names = {split: metrics_of(config.task, reported or ("loss",), whole=split != "train") or () for split in SPLITS}
    known = [*(f"{split}/{name}" for split in SPLITS for name in names[split]), *SPEEDS]
    problems = []
    for name in (goal["metric"] for goal in goals):
        split, _, leaf = name.partition("/")
        source = f"hydra.sweeper.metric={name}"
        is_known = name in known or (split in ("val", "test") and is_of_a_class(leaf, config.task))
        if split not in (*SPLITS, "speed") or not leaf or ((split == "speed" or reported) and not is_known):
            likely = [hit for hit in (f"val/{name}", f"val/{leaf}") if hit in known]
            hits = dict.fromkeys([*likely, *nearest(name, known, cutoff=0.6)])
            problem = f"no job has a metric `{name}`; there are {', '.join(known)}" + ("" if reported else ", ...")
            ways = [f"hydra.sweeper.metric={hit}" for hit in [*(hits or known)][:3]]
            problems.append(Problem.suggest(source, problem, ways))
        elif data in WITHOUT_SPLITS and split in ("val", "test") and config.data[f"{split}_fraction"] == 0:
            problem = f"`data.{split}_fraction=0` leaves no rows to measure `{name}`"
            fix = f"use `data.{split}_fraction=0.1`, or `hydra.sweeper.metric=train/{leaf}`"
            problems.append(Problem(source, problem, fix))
    return problems


def kept_by(goals: Goals, config: Any) -> tuple[str, ...]:
    """Return overrides that make a run choose its best epoch by the objective, unless the user set `train.best`.

    The default is val/loss; the best epoch can't depend on a train/ or test/ metric.
    """
    name, direction = goals[0]["metric"], goals[0]["direction"]
    stopping = config.train.early_stopping
    is_default = (name, direction) == ("val/loss", "minimize")
    if is_default or not name.startswith("val/") or stopping.metric or stopping.mode:
        return ()
    mode = "max" if direction == "maximize" else "min"
    return f"train.early_stopping.metric={name}", f"train.early_stopping.mode={mode}"


def _listed(words: Sequence[Any]) -> str:
    return as_text(words[0] if len(words) == 1 else [*words])


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
    numbers = [key for key, dimension in dimensions.items() if dimension.numbers]
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
    return [
        ("search", f"{settings.sampler}, {trials}, seed {settings.seed}"),
        ("goal", ", ".join(f"{goal['direction']} {goal['metric']}" for goal in goals)),
        ("pruner", pruner),
        ("space", f"\n{'':8}".join(dimensions)),
    ]
