"""Checks a configuration before any work: reports every error at once, or returns the device and the reason for it.

Everything that trains calls it, and so do sweeps, `plan`, `lr-find` and `evaluate`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from runner.config import override_errors, validate
from runner.config.allowed import PARTS
from runner.config.compose import composed_with, composer
from runner.config.instantiate import problems as target_problems
from runner.config.nodes import USUAL, split_settings
from runner.config.schema import PRECISIONS, SHARED
from runner.device import Choice, Hardware, check_precision, choose, parse, probe
from runner.device.choose import device_of_process, devices_of_processes
from runner.distributed.environment import rank_here
from runner.errors import Problem, RunnerError, nearest, path_problems
from runner.experiment import build, rules
from runner.experiment.build_optimizer import try_settings, turn_problems
from runner.experiment.context import Checked, RunContext
from runner.tasks.metric_names import NAMED, is_of_a_class, metrics_of
from runner.training.stopping import KEY, missing_metric

#: with an error in one of these keys, the optimizer or its schedule is not tried
OPTIMIZER_KEYS = re.compile(r"(^|\W)(optimizer|facts|~?train(?![.\w]))(\W|$)")
SCHEDULE_KEYS = re.compile(r"(^|\W)(scheduler|early_stopping|train.num_(steps|epochs))(\W|$)")


def check_here(cfg: DictConfig, *, context: RunContext = RunContext()) -> Checked:
    """Check a run that starts on this machine, and return the machine and the devices of its processes.

    Raises: RunnerError with every error.
    """
    hardware = probe()
    choice, has_slot = check(cfg, hardware, choice=context.device), context.device is not None
    devices, num = devices_of(cfg, hardware, choice, has_slot=has_slot)
    slot = choice.device if has_slot and rank_here(os.environ) is None else None
    has_pruner = context.trial is not None
    rules.check(cfg, rules.Situation(device=choice.device, num_processes=num, slot=slot, has_pruner=has_pruner))
    return Checked(hardware, devices)


def devices_of(
    cfg: DictConfig, hardware: Hardware, choice: Choice, *, has_slot: bool
) -> tuple[tuple[Choice, ...], int]:
    """Return a device for each process to start, or this process's own if it is one of several, and how many train.

    has_slot: The device is fixed, by a sweep or by the process that started this one.
    Raises: RunnerError for missing devices, and if another number of processes was started than is set.
    """
    policy, count = parse(validate.value(cfg, "device")), validate.value(cfg, "train.num_processes")
    if (rank := rank_here(os.environ)) is not None:
        if count not in ("auto", rank.num):
            ways = ["train.num_processes=auto", f"train.num_processes={rank.num}"]
            problem = f"{rank.by} has started {rank.num} processes"
            raise RunnerError.suggest(f"train.num_processes={count}", problem, ways)
        if not has_slot:
            choice = device_of_process(policy, rank.local_rank, rank.local_num, hardware)
        return (choice,), rank.num
    if not has_slot or choice.device == "cpu":
        devices = devices_of_processes(policy, count, hardware, choice=choice)
        return devices, len(devices)
    if count == "auto":
        count = len(devices_of_processes(policy, "auto", hardware)) if policy == ("all",) else 1
    return (choice,), count


def check(cfg: DictConfig, hardware: Hardware | None, *, choice: Choice | None = None) -> Choice:
    """Check everything that is known before any work, set `train.precision=auto`, and return the device and the reason for it.

    Args:
        cfg: The composed configuration.
        hardware: None for a sweep's job on another machine.
        choice: The device, if a sweep has chosen it.

    Raises:
        RunnerError: With every error.
    """
    problems, precision = validate.problems(cfg), validate.value(cfg, "train.precision")
    is_fixed = choice is not None
    try:
        if choice is None and hardware is not None:
            choice = choose(validate.value(cfg, "device"), hardware)
        if precision in PRECISIONS and hardware is not None and choice is not None:
            precision = check_precision(precision, choice.here, hardware)
    except RunnerError as error:
        problems += error.problems
    for key in validate.BUILT:
        if OmegaConf.is_dict(validate.value(cfg, key)):
            node, shared = split_settings(validate.target_node(cfg, key), key)
            problems += target_problems(node, key=key)
            if key in USUAL:
                problems += validate.setting_problems(OmegaConf.create({**USUAL[key], **shared}), SHARED[key], key)
    problems += (
        _path_problems(cfg)
        + hook_problems(cfg)
        + turn_problems(cfg)
        + metric_problems(cfg)
        + rules.clashes(cfg, _situation(cfg, hardware, choice, is_fixed=is_fixed))
    )
    if not any(OPTIMIZER_KEYS.search(fault.source) for fault in problems):
        has_schedule = not any(SCHEDULE_KEYS.search(fault.source) for fault in problems)
        problems += try_settings(cfg, mode=build.best_of(cfg).mode if has_schedule else None)
    if problems or choice is None:
        raise RunnerError(*problems)
    if precision != cfg.train.precision:
        cfg.train.precision = precision
    return choice


def _situation(cfg: DictConfig, hardware: Hardware | None, choice: Choice | None, *, is_fixed: bool) -> rules.Situation:
    if choice is None:
        return rules.Situation()
    num = None
    with suppress(RunnerError, TypeError, ValueError):  # an error in these settings is reported by the checks of each
        num = devices_of(cfg, hardware, choice, has_slot=is_fixed)[1] if hardware is not None else None
    return rules.Situation(device=choice.device, num_processes=num)


def _path_problems(cfg: DictConfig) -> list[Problem]:
    """Return the errors of paths that don't exist here. Custom data sets are not checked: they may read URLs."""
    problems = path_problems("hydra.run.dir", str(validate.value(cfg, "hydra.run.dir")), is_written=True)
    keys = ["model.weights"]
    if validate.value(cfg, "data._target_") in PARTS:
        keys += [f"data.{name}" for name in map(str, cfg.data) if name == "path" or name.endswith("_path")]
    for key in keys:
        value = validate.value(cfg, key)
        paths = [value] if isinstance(value, str) else value if OmegaConf.is_list(value) else []
        problems += [problem for path in paths for problem in path_problems(key, str(path))]
    return problems


def hook_problems(cfg: DictConfig) -> list[Problem]:
    """Return the errors of hooks, without building them."""
    problems = []
    for number, (node, _) in enumerate(build.hook_nodes(cfg)):
        problems += target_problems(node, key=f"train.hooks[{number}]")
    return problems


def metric_problems(cfg: DictConfig) -> list[Problem]:
    """Return an error for a metric that the task does not report, if it is a built-in one."""
    metric, task = validate.value(cfg, KEY), validate.value(cfg, "task")
    if not isinstance(metric, str) or not OmegaConf.is_dict(task):
        return []
    split, _, leaf = metric.partition("/")
    measured = metrics_of(task)
    if split != "val" or not leaf:
        problem = "epochs are compared by a metric of the validation split, val/..."
        hits = [f"val/{name}" for name in (metric, leaf) if name in (measured or ())]
        hits = [*hits, *nearest(metric, _of_val(measured or ("loss",)))] or ["val/loss"]
        return [Problem.suggest(f"{KEY}={metric}", problem, (f"{KEY}={hit}" for hit in hits))]
    if measured is None or leaf in measured or is_of_a_class(leaf, task) or validate.value(cfg, "train.hooks"):
        return []  # a hook's names come with its first call
    fault = missing_metric(metric, _of_val(measured))
    ways = [f"task.metrics=[{leaf}]"] if leaf in NAMED else []
    return [Problem.suggest(fault.source, fault.message, [*ways, *fault.suggestions], code=fault.code)]


def _of_val(names: Iterable[str]) -> list[str]:
    return [f"val/{name}" for name in names]


def composed(flags: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, Path]:
    """Return the composed configuration and the directory that Hydra would choose for its run.

    Raises:
        RunnerError: With every error.
    """
    compose = composer(list(flags))
    with override_errors.explained(overrides, compose=compose, check=check_here):
        cfg = composed_with(compose, overrides)
        return cfg, Path(HydraConfig.get().run.dir).absolute()
