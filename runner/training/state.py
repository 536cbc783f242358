"""The complete state of a run (weights, optimizer, schedule, generators, progress, unread metrics): collect it, restore it.

For fit.py; checkpoint.py writes it to files. All processes of a run make the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from runner.config.identity import changes, may_change
from runner.data.loading.order import mixed
from runner.data.loading.own_loader import Served
from runner.device import backends
from runner.distributed.group import Ranks
from runner.errors import Problem, RunnerError, first_line, refuse
from runner.training.checkpoint import CheckpointWriter, snapshot
from runner.training.loop import Progress
from runner.training.metric_buffer import MetricBuffer, NotFiniteError, check_unread
from runner.training.parts import Parts

T = TypeVar("T")

#: the rates in a parameter group
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
#: the counts in a checkpoint
NUMBERS = ("step", "epoch", "measured", "epochs_without_best", "num_pieces")


def restore(
    writer: CheckpointWriter, parts: Parts, buffer: MetricBuffer, *, ranks: Ranks, experiment: Mapping[str, Any]
) -> Progress:
    """Restore the last checkpoint, bitwise identical, or begin; returns the progress.

    Args:
        experiment: config.identity.chosen(), by which a checkpoint of another experiment is refused.

    Raises:
        RunnerError: For a checkpoint of another experiment, or of another program.
    """
    progress = Progress(best=parts.best)
    state = writer.last()
    if state is None:
        return progress
    _check_experiment(state.get("experiment"), experiment)
    try:
        _restore(state, parts, progress, writer, buffer)
        _restore_of_process(state, parts, ranks)
    except Exception as error:  # a checkpoint may come from elsewhere, and hold anything
        problem = f"the checkpoint is not of this model and optimizer, or no run wrote it: {type(error).__name__}: {first_line(error)}"
        fix = "use a new directory, or the checkpoint that its own run wrote"
        raise RunnerError.of("the folder's checkpoint", problem, fix) from error
    return progress


def restore_best(writer: CheckpointWriter, parts: Parts, progress: Progress) -> None:
    """Restore the best weights; without a validation split the last ones."""
    if progress.best.value is None:
        progress.best.step = progress.step
        writer.keep("best", best_state(parts, progress))
    best = writer.newest("best")
    assert best is not None
    _load_model(parts, parts.kept_model, best["model"])
    parts.carried.load_state(best.get("carried", {}))


def best_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """The weights that are saved, and their value."""
    best = progress.best
    model = _whole(parts, parts.kept_model.state_dict())
    carried = {"carried": state} if (state := parts.carried.state()) else {}
    return {"model": model, "step": best.step, "metric": best.metric, "value": best.value, **carried}


def _whole(parts: Parts, tree: T) -> T:
    return tree if parts.shards is None else parts.shards.whole(tree)


def _load_model(parts: Parts, model: nn.Module, state: dict[str, Any]) -> None:
    if parts.shards is None:
        model.load_state_dict(state)
    else:
        parts.shards.load_model(model, state)


def full_state(
    parts: Parts,
    progress: Progress,
    buffer: MetricBuffer,
    ranks: Ranks,
    *,
    seconds: float = 0.0,
    experiment: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """All that a checkpoint holds, in the first process; all processes take part.

    Args:
        seconds: Of training so far.
        experiment: config.identity.chosen().
    """
    carried = parts.carried.state()
    own = backends.generator_states(parts.device), snapshot(carried) if ranks.num > 1 else carried
    generators, carried_by = zip(*gathered, strict=True) if (gathered := ranks.gather(own)) else ((), ())
    return {
        "format": 3,
        "experiment": dict(experiment),
        **asdict(progress),
        "seconds": seconds,
        "num_steps": parts.limits.num_steps,
        "rows": buffer.state(),
        "model": _whole(parts, parts.model.state_dict()),
        "average": _whole(parts, parts.average.model.state_dict()) if parts.average else None,
        "optimizer": _whole(parts, parts.optimizer.state_dict()),
        "schedule": parts.schedule.state_dict(),
        "scaler": parts.precision.scaler.state_dict(),
        "loader": parts.train.state() if isinstance(parts.train, Served) else None,
        "generators": generators[0] if generators else {},
        "generators_of_others": list(generators[1:]),
        "carried": list(carried_by),
    }


def check_losses(state: Mapping[str, Any]) -> None:
    """Raise NotFiniteError for weights after a loss that is not finite. The buffer checks the rows that are pulled."""
    if "rows" in state:
        check_unread(state["rows"], step=state["step"])


def check_weights(state: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise NotFiniteError also for weights that are not finite, before their loss is. names: Of the weights."""
    check_losses(state)
    for name, value in state["model"].items():
        if name in names and not bool(value.isfinite().all()):
            raise NotFiniteError(state["step"], f"the weight {name}", math.nan)


def _check_experiment(before: Any, now: Mapping[str, Any]) -> None:
    before = before if isinstance(before, dict) else {}
    refuse(
        Problem(f"{key}={now[key]}", f"the checkpoint is of a run with `{key}={before[key]}`", "use a new directory")
        for key in changes(before, now)
        if key in before and key in now and not may_change(key)
    )


def _restore(
    state: dict[str, Any], parts: Parts, progress: Progress, writer: CheckpointWriter, buffer: MetricBuffer
) -> None:
    if not all(type(state[key]) is int and state[key] >= 0 for key in NUMBERS):
        raise ValueError("its steps and epochs are not counts")
    _restore_parts(state, parts)
    if state.get("loader") is not None and isinstance(parts.train, Served):
        parts.train.load_state(state["loader"])
    buffer.step = progress.step = state["step"]
    buffer.load_state(state["rows"])
    for name in (*NUMBERS, "rate", "seconds"):
        setattr(progress, name, state[name])
    progress.reached, progress.rollbacks = state.get("reached", ""), state.get("rollbacks", 0)  # not in old checkpoints
    best = writer.newest("best")
    if best is None and state["best"]["value"] is not None:
        writer.notes.append(f"best.pt of step {state['best']['step']} is missing: the next evaluation sets a new best")
    elif best is not None and state["best"]["value"] is not None:
        # if best.pt was damaged, its predecessor
        best = best if best["step"] < state["best"]["step"] else state["best"]
        progress.best.value, progress.best.step = best["value"], best["step"]


def _restore_parts(state: dict[str, Any], parts: Parts) -> None:
    begun = _settings(parts)
    _restore_weights(state, parts)
    num_steps = parts.limits.num_steps
    if parts.schedule.follows_steps and state.get("num_steps", num_steps) != num_steps:
        _set(parts, begun)
        parts.schedule.catch_up(state["step"])
    else:
        parts.schedule.load_state_dict(state["schedule"], step=state["step"])
    parts.precision.scaler.load_state_dict(state["scaler"])


def roll_back(state: dict[str, Any], parts: Parts, *, factor: float) -> None:
    """Return to a checkpoint's weights and optimizer state. The schedule continues, with its rates multiplied."""
    now = _settings(parts)
    _restore_weights(state, parts)
    parts.carried.load_state(next(iter(state["carried"]), {}))
    _set(parts, [{key: value * factor if key in RATES else value for key, value in each.items()} for each in now])
    parts.schedule.scale(factor)


def _restore_weights(state: dict[str, Any], parts: Parts) -> None:
    _load_model(parts, parts.model, state["model"])
    if parts.shards is None:
        parts.optimizer.load_state_dict(state["optimizer"])
    else:
        parts.shards.load_optimizer(parts.optimizer, state["optimizer"])
    if parts.average is not None:
        _load_model(parts, parts.average.model, state["average"])


def _settings(parts: Parts) -> list[dict[str, Any]]:
    groups = parts.optimizer.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _set(parts: Parts, settings: list[dict[str, Any]]) -> None:
    for group, values in zip(parts.optimizer.param_groups, settings, strict=True):
        group.update(values)


def _restore_of_process(state: dict[str, Any], parts: Parts, ranks: Ranks) -> None:
    carried = state.get("carried", [])  # missing in old checkpoints
    if ranks.rank < len(carried):
        parts.carried.load_state(carried[ranks.rank])
    generators = [state["generators"], *state.get("generators_of_others", [])]
    if ranks.rank < len(generators):
        backends.set_generator_states(generators[ranks.rank], parts.device)
    else:
        backends.seed_everything(mixed(torch.initial_seed(), state["step"]))
