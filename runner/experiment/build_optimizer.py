"""Makes the optimizer and the learning-rate schedule that the keys `optimizer` and `scheduler` name, for build.py.

For check.py it tries both with one parameter before any work, and reports the settings that are wrong.
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
from runner.config.instantiate import build
from runner.config.instantiate import problems as target_problems
from runner.config.nodes import resolved, split_settings
from runner.errors import OF_CODE, Problem, RunnerError, in_words, refuse
from runner.training.optimizer import KERNEL_CHOICES, Turns, check_settings, make_optimizer, matching
from runner.training.schedule import wants_metric

#: in place of what only the data knows
STAND_INS: dict[str, Any] = {
    **dict.fromkeys(
        ("in_features", "out_features", "num_classes", "vocab_size", "context_length", "padding_token"), 10
    ),
    "input_shape": [10],
    "class_counts": [10],
    "is_multilabel": False,
    "bytes_per_token": 1.0,
    "num_steps": 1000,
}
CALM = 10  # of a setting that has no usual value: a period, a number of steps
NUM_STEPS = 3  # of a trial
OTHERS = {"optimizer": "optimizer=adam, adamw or sgd", "scheduler": "scheduler=cosine or constant"}


def optimizer_of(cfg: DictConfig, model: nn.Module, *, device: torch.device, prefix: str = "") -> Optimizer:
    """Make the optimizer of the model's parameters; `prefix` precedes the names that the user knows.

    Raises: RunnerError for what it does not take, the model's parameters among it.
    """
    if turns := turns_of(cfg):
        return _taking_turns(cfg, turns, model, device=device, prefix=prefix)
    node = _node(cfg, "optimizer")
    shared = split_settings(resolved(cfg, "optimizer"), "optimizer")[1]
    shared.pop("turns", None)
    if "groups" in shared:
        shared["groups"] = [_numbers(group, node.usual) for group in shared["groups"]]
    try:
        make, precision = partial(node.make, **node.given), str(cfg.train.precision)
        return make_optimizer(make, model, device=device, prefix=prefix, precision=precision, **shared)
    except RunnerError:
        raise
    except OF_CODE as error:
        raise RunnerError(*(rehearsed(cfg) or [_of_target(node, error)])) from error


def schedule_of(cfg: DictConfig, optimizer: Optimizer, *, mode: str) -> LRScheduler | None:
    """None: the learning rates stay as they are. mode: min or max, whichever is better of the metric that epochs are judged by.

    Raises: RunnerError for what it does not take.
    """
    if not cfg.scheduler.get("_target_"):
        return None
    node = _node(cfg, "scheduler", mode=mode)
    if (each := _equal_rates(node, optimizer)) is not None:
        raise RunnerError(each)
    try:
        return _checked(node.make(optimizer, **node.given), mode)
    except RunnerError:
        raise
    except OF_CODE as error:
        each, rates = _of_target(node, error), [group["lr"] for group in optimizer.param_groups]
        if len(rates) > 1:
            problem = f"{each.message}; the optimizer has {len(rates)} groups, with the rates {_text(rates)}"
            each = replace(each, message=problem)
        raise RunnerError(*(rehearsed(cfg, mode=mode) or [each])) from error


def rehearsed(cfg: DictConfig, *, mode: str | None = "min") -> list[Problem]:
    """Try the optimizers and the schedule with one parameter for each group, and return what is wrong. Takes milliseconds.

    What depends on facts that are not known yet is left to optimizer_of() and schedule_of().

    mode: Whether the schedule's metric is minimized ("min") or maximized; None: the optimizers only.
    """
    found: list[Problem] = []
    makers: dict[str, Callable[[], Optimizer]] = {}
    turns = turns_of(cfg)
    for name, one in (turns or {"": cfg}).items():
        problems, makers[name] = _rehearsed_optimizers(one)
        found += [_of_turn(problem, cfg, name) if turns else problem for problem in problems]
    if mode is not None and cfg.scheduler.get("_target_"):
        with _standing_in(cfg) as unknown, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself gives them
            try:
                schedule = _node(cfg, "scheduler", but=unknown, mode=mode)
                has_groups = bool(turns or cfg.optimizer.get("groups") or cfg.optimizer.get("no_decay"))
                num_steps = min(NUM_STEPS, cfg.facts.num_steps)
                lists = [len(value) for value in schedule.given.values() if has_groups and isinstance(value, list)]

                def attempt(given: Mapping[str, Any]) -> BaseException | None:
                    """With the number of groups that a list is for: the model may make more or fewer of them."""
                    counts, try_it = (0, *lists), partial(_rehearse_schedule, schedule, given, mode, num_steps)
                    errors = [try_it(_all(makers, count)) for count in counts]
                    return None if None in errors else errors[0]

                blamed = _blamed(schedule, attempt)
                found += blamed or filter(None, [_equal_rates(schedule, _all(makers))])
            except RunnerError as error:
                found += error.problems
    return list(dict.fromkeys(found))


def _rehearsed_optimizers(cfg: DictConfig) -> tuple[list[Problem], Callable[[], Optimizer]]:
    with _standing_in(cfg) as unknown, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            node = _node(cfg, "optimizer", but=unknown)
            node = replace(node, given=_of_any_kernel(node.given))
            found = _optimizer_problems(node, cfg)
        except RunnerError as error:
            return list(error.problems), _any_optimizer
        if _rehearse_optimizer(node, node.given) is not None:  # it may be only for sparse gradients
            return found, _any_optimizer
        groups = split_settings(resolved(cfg, "optimizer"), "optimizer")[1].get("groups") or []
        own = [{"lr": group["lr"]} if "lr" in group else {} for group in (_numbers(one, node.usual) for one in groups)]

    def make() -> Optimizer:
        optimizer = _rehearsed_optimizer(node)
        for group in own:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], **group})
        return optimizer

    return found, _any_optimizer if found else make


def _all(makers: Mapping[str, Callable[[], Optimizer]], count: int = 0) -> Optimizer:
    each = {name: make() for name, make in makers.items()}
    one = _unwrapped(Turns)(each, dict.fromkeys(each, 1)) if len(each) > 1 else next(iter(each.values()))
    del one.param_groups[count or len(one.param_groups) :]
    for _ in range(len(one.param_groups), count):
        one.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    return one


def _equal_rates(node: _Node, optimizer: Optimizer) -> Problem | None:
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if len(set(rates)) == 1:
        return None

    def num_rates(given: Mapping[str, Any]) -> int:
        """The most that differ at one of the first steps; 0 where the schedule can't be made."""
        most, groups = 0, [{**group, "params": [nn.Parameter(torch.ones(2, 2))]} for group in optimizer.param_groups]
        copied: Optimizer = _unwrapped(Optimizer)(groups, optimizer.defaults)
        with warnings.catch_warnings(), suppress(*OF_CODE):  # a schedule may end after one step
            warnings.simplefilter("ignore")
            schedule = node.make(copied, **given)
            for _ in range(NUM_STEPS):
                most = max(most, len({float(group["lr"]) for group in copied.param_groups}))
                schedule.step(1.0) if wants_metric(schedule) else schedule.step()
        return most

    if num_rates(node.given) != 1:
        return None
    numbers = [name for name, value in node.given.items() if _is_number(value)]
    fixes = [f"scheduler.{name}={_text(rates)}" for name in numbers if num_rates({**node.given, name: rates}) > 1]
    problem = f"{node.name} gives all groups of the optimizer one rate, and their own rates are {_text(rates)}"
    return Problem(f"scheduler._target_={node.target}", problem, " or ".join([*fixes[:1], "scheduler=cosine"]))


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
    found = {}
    for name, asked in whole["turns"].items():
        usual = {"no_decay": whole.get("no_decay")} if "_target_" in asked else whole
        own = {key: value for key, value in asked.items() if key not in ("params", "every")}
        found[str(name)] = one = copy.deepcopy(cfg)
        with read_write(one), open_dict(one):
            OmegaConf.update(one, "optimizer", {**usual, **own, "turns": None}, merge=False)
    return found


def turn_problems(cfg: DictConfig) -> list[Problem]:
    """What is wrong with the targets of optimizers that take turns, and the names of their settings."""
    found = []
    for name, one in turns_of(cfg).items():
        node = split_settings(validate.target_node(one, "optimizer"), "optimizer")[0]
        found += [_of_turn(problem, cfg, name) for problem in target_problems(node, key="optimizer")]
    return list(dict.fromkeys(found))


def _of_turn(problem: Problem, cfg: DictConfig, name: str) -> Problem:
    for key in cfg.optimizer.turns[name]:
        before, here = re.compile(rf"optimizer\.{key}\b"), f"optimizer.turns.{name}.{key}"
        problem = replace(problem, source=before.sub(here, problem.source), help=before.sub(here, problem.help))
    return problem


def _taking_turns(
    cfg: DictConfig, turns: Mapping[str, DictConfig], model: nn.Module, *, device: torch.device, prefix: str
) -> Turns:
    """Raises: RunnerError for parameters that no optimizer owns, or more than one."""
    named = {name.removeprefix(prefix): each for name, each in model.named_parameters() if each.requires_grad}
    owners: dict[str, list[str]] = {name: [] for name in named}
    for turn, asked in cfg.optimizer.turns.items():
        patterns = [asked.params] if isinstance(asked.params, str) else asked.params
        key = f"optimizer.turns.{turn}.params"
        for name in set().union(*(matching(pattern, list(named), key=key) for pattern in patterns)):
            owners[name].append(str(turn))
    found = []
    if left := [name for name, by in owners.items() if not by]:
        problem = f"no optimizer owns {_some(left)}, and what trains has one"
        fix = f"use a pattern for it in the params of {' or '.join(turns)}, or model.freeze=[{left[0]}]"
        found.append(Problem("optimizer.turns", problem, fix))
    if shared := [name for name, by in owners.items() if len(by) > 1]:
        problem = f"{' and '.join(owners[shared[0]])} both own {_some(shared)}, and each parameter has one optimizer"
        found.append(Problem("optimizer.turns", problem, f"{shared[0]} in only one of them"))
    refuse(found)
    made = {}
    for turn, one in turns.items():
        others = [named[name] for name, by in owners.items() if by != [turn]]
        for parameter in others:  # what does not train, an optimizer is not made over
            parameter.requires_grad_(False)
        try:
            made[turn] = optimizer_of(one, model, device=device, prefix=prefix)
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
    return Turns(made, {str(turn): int(asked.get("every", 1)) for turn, asked in cfg.optimizer.turns.items()})


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


@dataclass(frozen=True)
class _Node:
    key: str
    target: str
    make: Callable[..., Any]
    given: Mapping[str, Any]
    usual: Mapping[str, Any]  # default values
    unknown: frozenset[str] = frozenset()  # settings that depend on the data

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]


def _node(cfg: DictConfig, key: str, *, but: frozenset[str] = frozenset(), mode: str | None = None) -> _Node:
    """The target of a top-level key and its settings; a text that is a number is one, where a number is wanted.

    but: facts that are not known.
    """
    written = validate.target_node(cfg, key)
    node = split_settings(resolved(cfg, key), key)[0]
    if mode is not None and node.get("mode", "") is None:
        node["mode"] = mode
    made = build(node, key=key)
    make, given = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
    target = str(node["_target_"])
    usual = _defaults(make)
    unknown = frozenset(name for name in given if any(f"facts.{fact}" in str(written.get(name)) for fact in but))
    return _Node(key, target, make, _numbers(given, usual), usual, unknown)


def _defaults(make: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _of_conf(key: str, target: str) -> dict[str, Any]:
    for file in sorted((CONF / key).glob("*.yaml")):
        node: Any = OmegaConf.to_container(OmegaConf.load(file))
        if node.get("_target_") == target:
            return {
                name: value
                for name, value in node.items()
                if name[0] != "_" and value is not None and "${" not in str(value)
            }
    return {}


def _numbers(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if _is_number(usual.get(name)) else value for name, value in given.items()}


def _number(value: Any) -> Any:
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def _standing_in(cfg: DictConfig) -> Iterator[frozenset[str]]:
    """Give facts that are not known yet some value, and yield their names."""
    unknown = [name for name in STAND_INS if OmegaConf.is_missing(cfg.facts, name)]
    steps = validate.value(cfg, "train.num_steps")
    with read_write(cfg.facts):
        for name in unknown:
            cfg.facts[name] = steps if name == "num_steps" and steps else STAND_INS[name]
        try:
            yield frozenset(unknown)
        finally:
            for name in unknown:
                cfg.facts[name] = "???"


def _optimizer_problems(node: _Node, cfg: DictConfig) -> list[Problem]:
    step = getattr(node.make, "step", None)
    wanted = (
        [each.name for each in inspect.signature(step).parameters.values() if each.default is each.empty][1:]
        if step
        else []
    )
    if wanted:
        problem = f"{node.name}.step() wants {', '.join(wanted)}, and a step here is taken once, from one gradient"
        return [Problem(f"optimizer._target_={node.target}", problem, OTHERS["optimizer"])]
    target = str(validate.value(cfg, "model._target_"))
    is_sparse = not target.startswith("runner.")  # may be; built-in ones only have dense gradients
    rehearse = partial(_rehearse_optimizer, node)
    if is_sparse and rehearse(node.given) is not None and rehearse(node.given, sparse=True) is None:
        return []
    found = _blamed(node, rehearse)
    if found:
        return found
    known = set(node.usual) | set(inspect.signature(node.make).parameters)
    for index, group in enumerate(split_settings(resolved(cfg, "optimizer"), "optimizer")[1].get("groups") or []):
        key = f"optimizer.groups[{index}]"
        own = {name: value for name, value in _numbers(group, node.usual).items() if name != "match"}
        check_settings(own, known, key)
        own = _of_any_kernel(own)
        found += _blamed(node, rehearse, given={**node.given, **own}, among=own, key=key)
    return found


def _of_any_kernel(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in KERNEL_CHOICES}


def _rehearse_optimizer(node: _Node, given: Mapping[str, Any], *, sparse: bool = False) -> BaseException | None:
    try:
        _rehearsed_optimizer(node, given, sparse=sparse)
    except OF_CODE as error:
        return error
    return None


def _rehearsed_optimizer(node: _Node, given: Mapping[str, Any] | None = None, *, sparse: bool = False) -> Optimizer:
    """One that has taken steps. Raises: whatever it raises, and ValueError for one that leads to nan or inf."""
    parameter = nn.Parameter(torch.ones(2, 2))
    make: Any = node.make
    kind = _unwrapped(make) if isinstance(make, type) and issubclass(make, Optimizer) else make
    optimizer: Any = kind([parameter], **(node.given if given is None else given))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"it makes a {type(optimizer).__name__}, which is not a torch.optim.Optimizer")
    for _ in range(NUM_STEPS):
        gradient = torch.ones(2, 2)
        parameter.grad = gradient.to_sparse(1) if sparse else gradient
        with torch.no_grad():
            optimizer.step()
    if not parameter.isfinite().all():
        raise ValueError(f"after {NUM_STEPS} steps with gradients of 1, a weight of 1 is {parameter.flatten()[0]:g}")
    return optimizer


def _unwrapped(kind: type[Optimizer]) -> Any:
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step")}
    return type(kind.__name__, (kind,), bare)


def _any_optimizer() -> Optimizer:
    optimizer: Optimizer = _unwrapped(Adam)([nn.Parameter(torch.ones(2, 2))])
    return optimizer


def _rehearse_schedule(
    node: _Node, given: Mapping[str, Any], mode: str, num_steps: int, optimizer: Optimizer
) -> BaseException | None:
    try:
        schedule = _checked(node.make(optimizer, **given), mode)
        for _ in range(num_steps):
            with torch.no_grad():
                optimizer.step()
            schedule.step(1.0) if wants_metric(schedule) else schedule.step()  # type: ignore[arg-type]
            for group in optimizer.param_groups:
                if not 0 <= group["lr"] < math.inf:
                    raise ValueError(f"it makes the learning rate {group['lr']}")
        schedule.state_dict()
    except OF_CODE as error:
        return error
    return None


def _checked(schedule: Any, mode: str) -> LRScheduler:
    """Raises: RunnerError for what can't be stepped here, TypeError for other classes."""
    if not all(callable(getattr(schedule, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise TypeError(f"it makes {type(schedule).__name__}, which is not a schedule")
    if wants_metric(schedule) and getattr(schedule, "mode", mode) != mode:
        better = "less" if mode == "min" else "more"
        problem = f"epochs are judged by a metric that is better when it is {better} (train.early_stopping.metric)"
        raise RunnerError(Problem(f"scheduler.mode={schedule.mode}", problem, f"scheduler.mode={mode}"))
    return schedule  # type: ignore[no-any-return]


def _blamed(
    node: _Node,
    attempt: Callable[[Mapping[str, Any]], BaseException | None],
    *,
    given: Mapping[str, Any] | None = None,
    among: Mapping[str, Any] | None = None,
    key: str | None = None,
) -> list[Problem]:
    """Return the settings that make an attempt fail: each with the defaults of the others, else all together.

    among: candidates (None: all). key: their prefix.
    """
    given, key = node.given if given is None else given, key or node.key
    among = given if among is None else among
    if (whole := attempt(given)) is not None:
        node = replace(node, usual={**node.usual, **_of_conf(node.key, node.target)})
    numbers = [name for name in among if isinstance(among[name], bool) and _is_number(node.usual.get(name))]
    found = [
        _problem(node, key, name, given[name], f"it must be a number, such as {node.usual[name]}") for name in numbers
    ]
    if whole is None:
        return found
    if isinstance(whole, RunnerError):
        return [*found, *whole.problems]
    calm = {name: _calm(node, name, value) for name, value in given.items()}
    if (even_so := attempt(calm)) is not None:
        open_ones = [name for name in among if node.usual.get(name) is None]
        if not open_ones:
            return [_of_target(node, even_so)]
        mending = [name for name in open_ones if attempt({**given, name: CALM}) is None]
        among = {name: among[name] for name in mending or open_ones}
        calm = {name: given[name] if name in among else value for name, value in calm.items()}
    alone = {name: error for name in among if (error := attempt({**calm, name: given[name]})) is not None}
    if not alone:  # it is what one makes of the others
        alone = {name: whole for name in among if attempt({**given, name: calm[name]}) is None}
    if alone.keys() & node.unknown or (not alone and node.unknown):
        alone = {name: error for name, error in alone.items() if name not in node.unknown}
        return [*found, *(_failed(node, key, name, given[name], error) for name, error in alone.items())]
    if not alone:
        return [*found, _of_target(node, whole)]
    return [
        *found,
        *(_failed(node, key, name, given[name], error) for name, error in alone.items() if name not in numbers),
    ]


def _calm(node: _Node, name: str, value: Any) -> Any:
    if name not in node.usual:
        return CALM
    return value if node.usual[name] is None else node.usual[name]


def _failed(node: _Node, key: str, name: str, value: Any, error: BaseException) -> Problem:
    if isinstance(error, RunnerError):
        return error.problems[0]
    usual = node.usual.get(name)
    if _is_number(usual) and not _is_number(value):
        return _problem(node, key, name, value, f"it must be a number, such as {usual}")
    return _problem(node, key, name, value, _said(node, error))


def _problem(node: _Node, key: str, name: str, value: Any, problem: str) -> Problem:
    fix = f"{key}.{name}={_text(node.usual[name])}" if name in node.usual else f"{key}.{name}=... with another value"
    return Problem(f"{key}.{name}={_text(value)}", problem, fix)


def _of_target(node: _Node, error: BaseException) -> Problem:
    if isinstance(error, RunnerError):
        return error.problems[0]
    return Problem(f"{node.key}._target_={node.target}", _said(node, error), OTHERS[node.key])


def _said(node: _Node, error: BaseException) -> str:
    return f"{node.name} does not take it: {_words(error)}"


def _words(error: BaseException) -> str:
    return " ".join(in_words(error).split())


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return str(value)
