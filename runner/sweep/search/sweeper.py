"""Hydra's sweeper with Optuna (hydra/sweeper=optuna): run a search over the overrides of `-m`.

It reads and checks the settings; study.py makes the sampler and the pruner, job_source.py the jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.packages import not_installed
from runner.config.schema import SearchKeys, find_key
from runner.config.validate import setting_problems, written
from runner.errors import Problem, RunnerError, refuse
from runner.sweep.jobs.prepare import is_of_the_sweep, parsed_params, refuse_swept_settings
from runner.sweep.search.job_source import Suggestions
from runner.sweep.search.objectives import Goals, goal_problems, kept_by, read_goals
from runner.sweep.search.space import Choices, Dimension, Numbers, Space, listed
from runner.sweep.search.study import Pruning
from runner.sweep.sweep import Plan, run_sweep

if TYPE_CHECKING:
    from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep


def read_space(words: Sequence[str], config_loader: Any, *, more: Mapping[str, Any] | None = None) -> Space:
    """Return the search space of the command line and of `hydra.sweeper.params` (more); the command line wins.

    Raises: RunnerError with all its problems; Hydra's error for overrides that can't be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=config_loader)
    own = parser.parse_overrides(list(words))
    refuse_swept_settings(own)
    given = {override.key_or_group for override in own}
    from_file = parsed_params(parser, more or {})
    overrides = [override for override in from_file if override.key_or_group not in given] + own
    fixed = [
        str(override.input_line)
        for override in overrides
        if not override.is_sweep_override() and not is_of_the_sweep(override)
    ]
    dimensions: dict[str, Dimension] = {}
    problems: list[Problem] = []
    for override in overrides:
        if not override.is_sweep_override():
            continue
        try:
            dimension = _dimension(override)
        except RunnerError as error:
            problems += error.problems
            continue
        key = dimension.word.lstrip("+~")
        if key in dimensions:
            problems.append(Problem(str(override.input_line), f"`{key}` is set twice", f"set `{key}` once"))
        dimensions[key] = dimension
    if not dimensions and not problems:
        problem = "no argument has several values, so there is nothing to search for"
        problems.append(
            Problem.suggest(" ".join(words) or "no words", problem, ["'optimizer.lr=tag(log,interval(1e-4,1e-1))'"])
        )
    refuse(problems)
    return Space(tuple(fixed), dimensions)


def _dimension(override: Override) -> Dimension:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    value: Any = override.value()
    if tags := set(getattr(value, "tags", ())) - {"log"}:
        raise _problem(
            override, f"there is no tag {min(tags)}", f"{override.key_or_group}=tag(log,interval(1e-4,1e-1))"
        )
    if isinstance(value, IntervalSweep):
        return _interval(override, value)
    if isinstance(value, RangeSweep):
        return _range(override, value)
    return _choices(override, value)


def _interval(override: Override, value: IntervalSweep) -> Numbers:
    low, high, is_log = value.start, value.end, "log" in value.tags
    assert low is not None and high is not None
    key, tag = override.key_or_group, "tag(log,{})" if is_log else "{}"
    if not low < high:
        raise _problem(override, "an interval goes up", f"{key}={tag.format(f'interval({high:g},{low:g})')}")
    if is_log and low <= 0:
        least = 1 if isinstance(low, int) else f"{high / 1000:g}"
        problem = "a logarithmic interval begins above 0"
        raise _problem(override, problem, f"{key}=tag(log,interval({least},{high:g}))")
    if isinstance(low, float) and (known := find_key(key)) is not None and known.kind.startswith("int"):
        problem = f"{key} is a whole number, and an interval is one of floats"
        raise _problem(override, problem, f"{key}={tag.format(f'int(interval({low:g},{high:g}))')}")
    step = 1 if isinstance(low, int) else None
    return Numbers(override.get_key_element(), low, high, step, is_log)


def _range(override: Override, value: RangeSweep) -> Numbers:
    is_log, key = "log" in value.tags, override.key_or_group
    if not value.step:
        raise _problem(override, "a step of 0 leads nowhere", f"{key}=range({value.start},{value.stop})")
    found = sorted(value.range())
    if not found:
        problem = "the range has no values: it goes from its start towards its end, which is not part of it"
        assert value.start is not None and value.stop is not None
        first, last = (value.stop, value.start) if value.start != value.stop else (value.start, value.start + 1)
        raise _problem(override, problem, f"{key}=range({first},{last})")
    if is_log and (value.step != 1 or found[0] < 1):
        problem = "a logarithmic range has steps of 1, and begins at 1 or above"
        raise _problem(override, problem, f"{key}=tag(log,interval({max(found[0], 1):g},{found[-1]:g}))")
    return Numbers(override.get_key_element(), found[0], found[-1], abs(value.step), is_log)


def _choices(override: Override, value: Any) -> Choices:
    from hydra.core.override_parser.types import ChoiceSweep, Transformer

    if getattr(value, "tags", ()):
        problem, fix = "choices have no scale", f"remove `tag(log, ...)` from `{override.key_or_group}`"
        raise RunnerError.of(str(override.input_line), problem, fix)
    if isinstance(value, ChoiceSweep):  # not by sweep_string_iterator(), which may shuffle
        texts = [Transformer.str(element) for element in value.list]
    else:
        texts = list(override.sweep_string_iterator())
    if not texts:
        problem = f"no file in {override.key_or_group} has such a name"
        raise _problem(override, problem, f"{override.key_or_group}=glob(*)")
    return Choices(override.get_key_element(), tuple(dict.fromkeys(texts)))


def _problem(override: Override, problem: str, way: str) -> RunnerError:
    return RunnerError.suggest(str(override.input_line), problem, [shlex.quote(way)])


KEY = "hydra.sweeper"
BY_NUMBER = "${hydra.job.num}"
#: keys by which jobs differ randomly
CHANCE = ("seed", "data.fold")


class Search(Sweeper):
    """Runs the trials that an Optuna study suggests, as many at a time as there are slots."""

    def __init__(self, **settings: Any) -> None:
        """settings: Not used here: they are read from the composed configuration."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def sweep(self, arguments: list[str]) -> Any:
        return run_sweep(self._plan(arguments), self._context, self._config)

    def _plan(self, arguments: list[str]) -> Plan:
        """Raises: RunnerError with all problems of the settings and the space."""
        settings = read_settings(self._config.hydra.sweeper)
        problems: list[Problem] = []
        goals, found = read_goals(settings.metric, settings.direction)
        problems += found
        if self._config.sweep.until:
            problem = "a search tries each combination once"
            problems.append(Problem("sweep.until=decided", problem, "use `sweep.until=null`, or `hydra/sweeper=grid`"))
        if self._config.sweep.zip:
            problem = "a search chooses each key's value independently"
            problems.append(Problem("sweep.zip", problem, "use `KEY=VALUE1,VALUE2`, or `hydra/sweeper=grid`"))
        try:
            space = read_space(arguments, self._context.config_loader, more=settings.params)
        except RunnerError as error:
            raise RunnerError(*problems, *error.problems) from None
        problems += goal_problems(goals, self._config, space.dimensions)
        subdir = written(self._config.hydra.sweep, "subdir")
        if subdir != BY_NUMBER:
            problem = "a search names its directories by the trials' numbers"
            problems.append(
                Problem.suggest(f"hydra.sweep.subdir={subdir}", problem, [f"hydra.sweep.subdir='{BY_NUMBER}'"])
            )
        problems += _sampler_problems(settings, space, goals)
        kind, why, found = choose_pruner(settings.pruner, goals)
        problems += found + _missing_packages(settings)
        refuse(problems)
        space = Space((*kept_by(goals, self._config), *space.fixed), space.dimensions)
        pruning = None
        if kind is not None:
            num_epochs = _num_epochs(self._config, space)
            pruning = Pruning(kind, settings.warmup_epochs, settings.startup_trials, num_epochs)
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


def choose_pruner(asked: str | None, goals: Goals) -> tuple[str | None, str, list[Problem]]:
    """Return the pruner's kind (None: no pruner), the reason for an automatic one, and a problem of the setting."""
    metric = goals[0]["metric"]
    if len(goals) > 1:
        why = "pruning needs a single metric"
    elif not metric.startswith(("train/", "val/")):
        why = f"no epoch reports `{metric}`"
    elif asked == "auto":
        return "median", "", []
    else:
        return (None if asked in (None, "none") else asked), "", []
    if asked in ("auto", "none", None):
        return None, why if asked == "auto" else "", []
    fix = f"use `{KEY}.pruner=none`, or `{KEY}.metric=val/loss`"
    return None, "", [Problem(f"{KEY}.pruner={asked}", why, fix)]


def _sampler_problems(settings: SearchKeys, space: Space, goals: Goals) -> list[Problem]:
    asked = f"{KEY}.sampler={settings.sampler}"
    dimensions = space.dimensions
    if settings.sampler == "grid":
        endless = [key for key, dimension in dimensions.items() if listed(dimension) is None]
        fix = f"use `{KEY}.sampler=random` or `tpe`, or `{{}}=0.001,0.01,0.1`"
        return [Problem(asked, f"`{key}` is an interval, and a grid needs values", fix.format(key)) for key in endless]
    if settings.sampler != "cmaes":
        return []
    problems = []
    numbers = [key for key, dimension in dimensions.items() if not isinstance(dimension, Choices)]
    if len(numbers) < 2:
        problem = f"CMA-ES needs two or more numbers, and of {', '.join(dimensions)} only {', '.join(numbers) or 'none'} is one"
        problems.append(Problem.suggest(asked, problem, [f"{KEY}.sampler=tpe"]))
    if len(goals) > 1:
        problems.append(
            Problem.suggest(asked, "CMA-ES needs a single metric", [f"{KEY}.sampler=nsga2", f"{KEY}.sampler=tpe"])
        )
    return problems


def _missing_packages(settings: SearchKeys) -> list[Problem]:
    needed = ["optuna", *(["cmaes"] if settings.sampler == "cmaes" else [])]
    missing = [name for name in needed if find_spec(name) is None]
    asked = f"hydra/sweeper=optuna, sampler={settings.sampler}"
    return [not_installed(asked, f"the package `{name}` is not installed", "search").problems[0] for name in missing]


def _num_epochs(config: DictConfig, space: Space) -> int | None:
    if config.train.num_steps is not None or config.train.evaluate_every_steps is not None:
        return None
    if {"train.num_steps", "train.num_epochs"} & set(space.dimensions):
        return None
    return int(config.train.num_epochs)


def _lines(
    settings: SearchKeys, space: Space, goals: Goals, pruning: Pruning | None, why: str
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
