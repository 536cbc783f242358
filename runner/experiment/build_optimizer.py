"""Makes the optimizer and the learning-rate schedule that the keys `optimizer` and `scheduler` name, for build.py.

For check.py it tries both with one parameter before any work, and finds the settings that are wrong.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runner.config import schema, validate
from runner.config.compose import CONF
from runner.config.identity import as_text
from runner.config.instantiate import build
from runner.config.instantiate import problems as target_problems
from runner.config.nodes import resolved, split_settings
from runner.device.torch_private import optimizers_without_dynamo
from runner.errors import CODE_ERRORS, Problem, RunnerError, in_words, listed, refuse
from runner.training.loop import Best
from runner.training.optimizer import KERNEL_CHOICES, Turns, check_settings, make_optimizer, matching
from runner.training.schedule import Schedule, wants_metric

#: in place of facts that only the data has
COUNTS = ("in_features", "out_features", "num_classes", "vocab_size", "context_length", "padding_token")
STAND_INS: dict[str, Any] = dict.fromkeys(COUNTS, 10) | {
    "input_shape": [10],
    "class_counts": [10],
    "is_multilabel": False,
    "bytes_per_token": 1.0,
    "num_steps": 1000,
}
#: classes of torch.optim.lr_scheduler whose documentation calls step() after each batch; the others after each epoch
BY_STEP = ("OneCycleLR", "CyclicLR")
SAFE_VALUE = 10  # of a setting without a default: a period, a number of steps
NUM_STEPS = 3  # of a trial
OTHERS = {
    "optimizer": ("optimizer=adam", "optimizer=adamw", "optimizer=sgd"),
    "scheduler": ("scheduler=cosine", "scheduler=constant"),
}

Make = Callable[[Mapping[str, Any]], Any]  # makes something from settings, or raises what they cause


def optimizer_of(cfg: DictConfig, model: nn.Module, *, device: torch.device, prefix: str = "") -> Optimizer:
    """Make the optimizer of the model's parameters; `prefix` precedes the names that the user knows.

    Raises: RunnerError for settings and parameters that it does not take.
    """
    if turns := turns_of(cfg):
        return _make_turns(cfg, turns, model, device=device, prefix=prefix)
    target = _target(cfg, "optimizer")
    shared = split_settings(resolved(cfg, "optimizer"), "optimizer")[1]
    shared.pop("turns", None)
    if "groups" in shared:
        shared["groups"] = [_numbers(group, target.defaults) for group in shared["groups"]]
    make = partial(target.make, **target.settings)
    may_skip = cfg.train.precision == "fp16" or cfg.train.on_nonfinite == "skip"
    with _explained(cfg, target, mode=None):
        return make_optimizer(make, model, device=device, prefix=prefix, may_skip=may_skip, **shared)


def schedule_of(cfg: DictConfig, optimizer: Optimizer, *, best: Best, steps_per_epoch: int) -> Schedule:
    """Make the schedule of an optimizer's rates. Raises: RunnerError for settings that it does not take."""
    if not cfg.scheduler.get("_target_"):
        return Schedule()
    target = _target(cfg, "scheduler", mode=best.mode)
    with _explained(cfg, target, mode=best.mode):
        made = _make_schedule(target, target.settings, optimizer, best.mode, cfg)
    unit, every = ("epoch", steps_per_epoch) if _interval(cfg) == "epoch" else ("optimizer step", 1)
    unit = f"evaluation, by {best.metric}" if wants_metric(made) else unit
    return Schedule(made, metric=best.metric, every=every, words=f"{target.name} advances after each {unit}")


@contextmanager
def _explained(cfg: DictConfig, target: _Target, *, mode: str | None) -> Iterator[None]:
    """Report an error of the target's code by the settings that cause it, as far as a trial shows them."""
    try:
        yield
    except RunnerError:
        raise
    except CODE_ERRORS as error:
        raise RunnerError(*(try_settings(cfg, mode=mode) or [_target_problem(target, error)])) from error


def try_settings(cfg: DictConfig, *, mode: str | None = "min") -> list[Problem]:
    """Try the optimizers and the schedule with one parameter for each group, and return what is wrong. Takes milliseconds.

    What depends on unknown facts, or on the model's number of groups, is left to optimizer_of() and schedule_of().

    mode: Whether the schedule's metric is minimized ("min") or maximized; None: the optimizers only.
    """
    problems: list[Problem] = []
    optimizers: list[Optimizer] = []
    cfg, unknown = _with_stand_ins(cfg)
    with warnings.catch_warnings(), optimizers_without_dynamo():
        warnings.simplefilter("ignore")  # the run itself gives them
        turns = turns_of(cfg)
        for name, one in (turns or {"": cfg}).items():
            try:
                optimizers.append(_try_optimizer(one, unknown))
            except RunnerError as error:
                problems += [_of_turn(problem, cfg, name) if turns else problem for problem in error.problems]
        if mode is not None and cfg.scheduler.get("_target_"):
            try:
                _try_schedule(cfg, _merged(optimizers or [Adam([_parameter()])]), unknown, mode)
            except RunnerError as error:
                problems += error.problems
    return list(dict.fromkeys(problems))


def turns_of(cfg: DictConfig) -> dict[str, DictConfig]:
    """Return a configuration for each optimizer of `optimizer.turns` by name, or {} with one optimizer.

    An optimizer with a `_target_` has only its own settings, the others also those of `optimizer`.
    """
    turns = validate.value(cfg, "optimizer.turns")
    if not turns:
        return {}
    whole: Any = OmegaConf.to_container(cfg.optimizer)
    if not schema.fits(whole["turns"], schema.TURNS):
        return {}
    configurations = {}
    for name, turn in whole["turns"].items():
        usual = {"no_decay": whole.get("no_decay")} if "_target_" in turn else whole
        own = {key: value for key, value in turn.items() if key not in ("params", "every")}
        configurations[str(name)] = one = copy.deepcopy(cfg)
        with read_write(one), open_dict(one):
            OmegaConf.update(one, "optimizer", {**usual, **own, "turns": None}, merge=False)
    return configurations


def turn_problems(cfg: DictConfig) -> list[Problem]:
    """Return what is wrong with the targets of optimizers that take turns, and the names of their settings."""
    problems = []
    for name, one in turns_of(cfg).items():
        node = split_settings(validate.target_node(one, "optimizer"), "optimizer")[0]
        problems += [_of_turn(problem, cfg, name) for problem in target_problems(node, key="optimizer")]
    return list(dict.fromkeys(problems))


def _of_turn(problem: Problem, cfg: DictConfig, name: str) -> Problem:
    keys = "|".join(map(re.escape, cfg.optimizer.turns[name]))
    source, text, *suggestions = (
        re.sub(rf"optimizer\.({keys})\b", rf"optimizer.turns.{name}.\1", each)
        for each in (problem.source, problem.help, *problem.suggestions)
    )
    return replace(problem, source=source, help=text, suggestions=tuple(suggestions))


def _make_turns(
    cfg: DictConfig, turns: Mapping[str, DictConfig], model: nn.Module, *, device: torch.device, prefix: str
) -> Turns:
    named = {name.removeprefix(prefix): each for name, each in model.named_parameters() if each.requires_grad}
    settings = {str(turn): each for turn, each in cfg.optimizer.turns.items()}
    owned: dict[str, set[str]] = {}
    for turn in turns:
        patterns, key = settings[turn].params, f"optimizer.turns.{turn}.params"
        patterns = [patterns] if isinstance(patterns, str) else patterns
        owned[turn] = set().union(*(matching(pattern, list(named), key=key) for pattern in patterns))
    owners = {name: [turn for turn in turns if name in owned[turn]] for name in named}
    problems = []
    if left := [name for name, by in owners.items() if not by]:
        problem = f"no optimizer owns {listed(left, 3)}, and what trains has one"
        fix = f"use a pattern for it in the params of {' or '.join(turns)}, or `'model.freeze=[{left[0]}]'`"
        problems.append(Problem("optimizer.turns", problem, fix))
    if shared := [name for name, by in owners.items() if len(by) > 1]:
        problem = (
            f"{' and '.join(owners[shared[0]])} both own {listed(shared, 3)}, and each parameter has one optimizer"
        )
        problems.append(Problem("optimizer.turns", problem, f"name `{shared[0]}` in only one of them"))
    refuse(problems)
    made = {}
    try:
        for turn, one in turns.items():
            for name, parameter in named.items():  # optimizer_of() leaves out frozen parameters
                parameter.requires_grad_(name in owned[turn])
            made[turn] = optimizer_of(one, model, device=device, prefix=prefix)
    finally:
        for parameter in named.values():
            parameter.requires_grad_(True)
    return Turns(made, {turn: int(settings[turn].get("every", 1)) for turn in turns})


@dataclass(frozen=True)
class _Target:
    """The function or class of a key, and its settings."""

    key: str
    path: str
    make: Callable[..., Any]
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    unknown: frozenset[str] = frozenset()  # settings that depend on the data

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def _target(cfg: DictConfig, key: str, *, unknown: frozenset[str] = frozenset(), mode: str | None = None) -> _Target:
    """Return the target of a key; a text that is a number is one, where a number is the default.

    unknown: facts that are not known yet.
    """
    written, node = validate.target_node(cfg, key), split_settings(resolved(cfg, key), key)[0]
    if mode is not None and node.get("mode", "") is None:
        node["mode"] = mode
    made = build(node, key=key)
    make, settings = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
    try:
        parameters = [*inspect.signature(make).parameters.values()]
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = []
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    of_facts = {name for name in settings for fact in unknown if f"facts.{fact}" in str(written.get(name))}
    return _Target(key, str(node["_target_"]), make, _numbers(settings, defaults), defaults, frozenset(of_facts))


def _conf_defaults(target: _Target) -> dict[str, Any]:
    for file in sorted((CONF / target.key.partition(".")[0]).glob("*.yaml")):
        node: Any = OmegaConf.to_container(OmegaConf.load(file))
        if node.get("_target_") == target.path:
            return {name: node[name] for name in node if isinstance(node[name], bool | int | float)}
    return {}


def _numbers(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if _is_number(defaults.get(name)) else value for name, value in settings.items()}


def _number(value: Any) -> Any:
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_no_number(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))


def _with_stand_ins(cfg: DictConfig) -> tuple[DictConfig, frozenset[str]]:
    """Return a copy in which facts that are not known yet have some value, and their names."""
    unknown = [name for name in STAND_INS if OmegaConf.is_missing(cfg.facts, name)]
    filled = OmegaConf.masked_copy(
        cfg, [str(key) for key in cfg if key != "hydra"]
    )  # as long as all the others together
    steps = validate.value(cfg, "train.num_steps")
    with read_write(filled.facts):
        for name in unknown:
            filled.facts[name] = steps if name == "num_steps" and steps else STAND_INS[name]
    return filled, frozenset(unknown)


def _try_optimizer(cfg: DictConfig, unknown: frozenset[str]) -> Optimizer:
    """Return the optimizer with its groups. Raises: RunnerError for what is wrong with its settings."""
    target = _target(cfg, "optimizer", unknown=unknown)
    target = replace(target, settings=_of_any_kernel(target.settings))

    def make(settings: Mapping[str, Any]) -> Optimizer:
        made = target.make([_parameter()], **settings)
        if not isinstance(made, Optimizer):
            raise TypeError(f"it makes a {type(made).__name__}, which is not a torch.optim.Optimizer")
        return made

    refuse(_wrong_settings(target, make, target.settings))
    optimizer, problems = make(target.settings), []
    known = set(target.defaults) | set(inspect.signature(target.make).parameters)
    for index, group in enumerate(split_settings(resolved(cfg, "optimizer"), "optimizer")[1].get("groups") or []):
        key, own = f"optimizer.groups[{index}]", {name: group[name] for name in group if name != "match"}
        check_settings(own, known, key)
        own = _of_any_kernel(_numbers(own, target.defaults))
        problems += _wrong_settings(replace(target, key=key, settings={**target.settings, **own}), make, own)
        if not problems:
            rate = {"lr": _number(own["lr"])} if "lr" in own else {}
            optimizer.add_param_group({"params": [_parameter()], **rate})
    refuse(problems)
    return optimizer


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2))


def _of_any_kernel(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in KERNEL_CHOICES}


def _merged(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return an optimizer with the groups of several that takes no steps: a schedule only sets its rates."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    defaults = {name: value for each in reversed(optimizers) for name, value in each.defaults.items()}
    own = [{**group, "params": [_parameter()]} for group in groups]
    return Optimizer(own, defaults)


def _try_schedule(cfg: DictConfig, optimizer: Optimizer, unknown: frozenset[str], mode: str) -> None:
    """Advance the schedule a few times. Raises: RunnerError for what is wrong with its settings.

    Also for one that gives all groups of the optimizer one rate in each of these steps, where they have their own.
    """
    target = _target(cfg, "scheduler", unknown=unknown, mode=mode)
    if any(isinstance(value, list) for value in target.settings.values()):
        return  # only the model shows how many groups there are
    num_steps = min(NUM_STEPS, cfg.facts.num_steps)
    if _interval(cfg) == "epoch" and not cfg.train.num_steps:
        num_steps = min(NUM_STEPS, cfg.train.num_epochs)

    def make(settings: Mapping[str, Any]) -> None:
        own = _merged([optimizer])
        own_rates = _rates(own)
        schedule: Any = _make_schedule(target, settings, own, mode, cfg)
        rates = [_rates(own)]
        for _ in range(num_steps):
            schedule.step(1.0) if wants_metric(schedule) else schedule.step()
            rates.append(_rates(own))
            if wrong := [rate for rate in rates[-1] if not 0 <= rate < math.inf]:
                raise ValueError(f"it makes the learning rate {wrong[0]}")
        schedule.state_dict()
        if len(set(own_rates)) > 1 and num_steps > 1 and all(len(set(each)) == 1 for each in rates):
            problem = f"{target.name} gives all groups of the optimizer one rate, and their own rates are "
            ways = [f"scheduler.max_lr={as_text(own_rates)}"] if "max_lr" in settings else []
            ways.append("scheduler=cosine")
            raise RunnerError.suggest(f"scheduler._target_={target.path}", problem + as_text(own_rates), ways)

    refuse(_wrong_settings(target, make, target.settings))


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _interval(cfg: DictConfig) -> str:
    """Return `scheduler.interval`, or how code that has this schedule calls it, if it is null."""
    node = validate.target_node(cfg, "scheduler")
    home, _, name = str(node["_target_"]).rpartition(".")
    is_by_epoch = home.startswith("torch.") and name not in BY_STEP and "facts.num_steps" not in str(node)
    return str(node.get("interval") or ("epoch" if is_by_epoch else "step"))


def _make_schedule(
    target: _Target, settings: Mapping[str, Any], optimizer: Optimizer, mode: str, cfg: DictConfig
) -> LRScheduler:
    schedule = target.make(optimizer, **settings)
    if not all(callable(getattr(schedule, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise TypeError(f"it makes {type(schedule).__name__}, which is not a schedule")
    if wants_metric(schedule) and getattr(schedule, "mode", mode) != mode:
        better = "less" if mode == "min" else "more"
        problem = f"epochs are judged by a metric that is better when it is {better} (train.early_stopping.metric)"
        raise RunnerError.suggest(f"scheduler.mode={schedule.mode}", problem, [f"scheduler.mode={mode}"])
    if wants_metric(schedule) and (interval := validate.value(cfg, "scheduler.interval")):
        problem = f"{type(schedule).__name__} follows a metric, so it advances after each evaluation"
        raise RunnerError.suggest(f"scheduler.interval={interval}", problem, ["scheduler.interval=null"])
    return schedule  # type: ignore[no-any-return]


def _wrong_settings(target: _Target, make: Make, among: Mapping[str, Any]) -> list[Problem]:
    """Return an error for each setting that fails with the defaults of all others, or for the target if none does.

    A value that isn't a finite number, where the default is a number, is wrong even if the target takes it.
    """
    wrong: dict[str, BaseException | None] = {
        name: None for name, value in among.items() if _is_number(target.defaults.get(name)) and _is_no_number(value)
    }
    error = _error_of(make, target.settings)
    if error is None and not wrong:
        return []
    target = replace(target, defaults={**target.defaults, **_conf_defaults(target)})
    known = error.problems if isinstance(error, RunnerError) else ()
    if error is not None and not known:
        usual = {name: target.defaults.get(name) for name in target.settings}
        safe = {name: SAFE_VALUE if value is None else value for name, value in usual.items()}
        if _error_of(make, safe) is None:
            errors = {name: _error_of(make, {**safe, name: among[name]}) for name in among if name not in wrong}
            wrong |= {name: each for name, each in errors.items() if each is not None}
        if not wrong and not target.unknown:
            return [_target_problem(target, error)]
    mine = [name for name in among if name in wrong and name not in target.unknown]
    return [*(_setting_problem(target, name, wrong[name]) for name in mine), *known]


def _error_of(make: Make, settings: Mapping[str, Any]) -> BaseException | None:
    try:
        make(settings)
    except CODE_ERRORS as error:
        return error
    return None


def _setting_problem(target: _Target, name: str, error: BaseException | None) -> Problem:
    if isinstance(error, RunnerError):
        return error.problems[0]
    value, usual, key = target.settings[name], target.defaults.get(name), f"{target.key}.{name}"
    reason = f"`{key}` must be a number, such as {usual}"
    if error is not None and (_is_number(value) or not _is_number(usual)):
        reason = _reason(target, error)
    ways = [f"{key}={as_text(usual)}"] if name in target.defaults else []
    return Problem.suggest(f"{key}={as_text(value)}", reason, ways, f"use another value of `{key}`")


def _target_problem(target: _Target, error: BaseException) -> Problem:
    return Problem.suggest(f"{target.key}._target_={target.path}", _reason(target, error), OTHERS[target.key])


def _reason(target: _Target, error: BaseException) -> str:
    return f"{target.name} does not take it: {' '.join(in_words(error).split())}"
