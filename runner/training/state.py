"""Gathers all that a run goes on from (weights, optimizer, schedule, generators, progress, unread metrics), and puts it back.

For fit.py; checkpoint.py writes it to files. All processes of a run make the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from runner.config.identity import changes, may_change
from runner.data.loading.order import mixed
from runner.data.loading.served import Served
from runner.device import backends
from runner.distributed.group import Ranks
from runner.errors import Problem, RunnerError, first_line
from runner.training.background import Background
from runner.training.checkpoint import CheckpointWriter
from runner.training.kept import Keeping
from runner.training.metric_buffer import Rows, check_unread
from runner.training.parts import Parts
from runner.training.progress import Progress
from runner.training.schedule import StepSchedule

T = TypeVar("T")

#: what of a checkpoint are counts
NUMBERS = ("step", "epoch", "measured", "epochs_without_best", "num_pieces")


class Checkpoints:
    """What a run goes on from, and where it is kept while it lasts. All processes of a run make the same calls."""

    def __init__(
        self,
        parts: Parts,
        folder: Path,
        background: Background,
        *,
        ranks: Ranks,
        experiment: Mapping[str, Any],
        keep: str | None = None,
    ) -> None:
        """experiment: what config.identity.chosen() gives of the configuration, by which a checkpoint is known.

        keep: train.keep_checkpoints, which of the measured steps have one that stays.
        """
        self._parts, self._ranks, self._experiment = parts, ranks, experiment
        best = parts.best
        self._keeps_measured = keep is not None
        self._keeper = CheckpointWriter(
            folder / "checkpoints",
            background,
            writes=ranks.is_first,
            device=parts.device,
            keeping=Keeping.of(keep, metric=best.metric, mode=best.mode) if keep else None,
            check=_check_losses,
        )

    def restore(self, buffer: Rows) -> Progress:
        """The beginning, or where the folder's last checkpoint says: all parts are put there, to the bit.

        Raises: RunnerError for a checkpoint of another experiment.
        """
        progress = Progress(best=self._parts.best)
        state = self._keeper.last()
        if state is None:
            return progress
        _check_experiment(state.get("experiment"), self._experiment)
        try:
            _put_back(state, self._parts, progress, self._keeper, buffer)
            _draw_on(state, self._parts, self._ranks)
        except Exception as error:  # a checkpoint may come from elsewhere, and hold anything
            problem = f"it is not of this model and optimizer, or no run wrote it: {type(error).__name__}: {first_line(error)}"
            fix = "the run in a new folder, or the checkpoint that its own run wrote"
            raise RunnerError(Problem("the folder's checkpoint", problem, fix)) from error
        return progress

    @property
    def notes(self) -> list[str]:
        """What was wrong with a file when it was read, and what was taken instead."""
        return self._keeper.notes

    def keep_best(self, progress: Progress) -> None:
        """Takes the weights as the best so far; written in the background."""
        self._keeper.keep("best", best_state(self._parts, progress))

    def keep_last(
        self, progress: Progress, buffer: Rows, *, seconds: float, measured: Mapping[str, float] | None = None
    ) -> None:
        """Takes everything that a run goes on from; waits for the device, and is written in the background.

        measured: the values of a step whose checkpoint stays.
        """
        state = full_state(self._parts, progress, buffer, self._ranks)
        if not self._ranks.is_first:
            return
        entry = None
        if measured is not None:
            entry = {"step": progress.step, "epoch": progress.epoch, "metrics": dict(measured)}
        state |= {"seconds": seconds, "experiment": dict(self._experiment)}
        self._keeper.keep("last", state, entry=entry)

    def keep_measured(self, progress: Progress, buffer: Rows, *, seconds: float, measured: Mapping[str, float]) -> None:
        """The same for a step that has been measured, where those are kept."""
        if self._keeps_measured:
            self.keep_last(progress, buffer, seconds=seconds, measured=measured)

    def use_best(self, progress: Progress) -> None:
        """Puts the best weights back; without a validation split the last ones are the best there are."""
        if progress.best.value is None:
            progress.best.step = progress.step
            self.keep_best(progress)
        best = self._keeper.newest("best")
        assert best is not None
        put_back_best(self._parts, best)


def best_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """The weights that are kept, and what they reached."""
    best = progress.best
    model = _whole(parts, parts.kept_model.state_dict())
    return {"model": model, "step": best.step, "metric": best.metric, "value": best.value}


def put_back_best(parts: Parts, state: dict[str, Any]) -> None:
    """The kept weights as best_state() gave them."""
    _load_model(parts, parts.kept_model, state["model"])


def _whole(parts: Parts, tree: T) -> T:
    return tree if parts.shards is None else parts.shards.whole(tree)


def _load_model(parts: Parts, model: nn.Module, state: dict[str, Any]) -> None:
    if parts.shards is None:
        model.load_state_dict(state)
    else:
        parts.shards.load_model(model, state)


def full_state(parts: Parts, progress: Progress, buffer: Rows, ranks: Ranks) -> dict[str, Any]:
    """Everything that a run goes on from; all of its processes take part, and the first one has it whole."""
    best = progress.best
    generators = ranks.gather(backends.generator_states(parts.device))
    return {
        "format": 3,
        "step": progress.step,
        "num_steps": parts.limits.num_steps,
        "epoch": progress.epoch,
        "measured": progress.measured,
        "rate": progress.rate,
        "rows": buffer.state(),
        "num_pieces": progress.num_pieces,
        "num_together": progress.num_together,
        "epochs_without_best": progress.epochs_without_best,
        "best": {"metric": best.metric, "mode": best.mode, "value": best.value, "step": best.step},
        "model": _whole(parts, parts.model.state_dict()),
        "average": _whole(parts, parts.average.model.state_dict()) if parts.average else None,
        "optimizer": _whole(parts, parts.optimizer.state_dict()),
        "schedule": parts.schedule.state_dict(),
        "scaler": parts.precision.scaler.state_dict(),
        "loader": parts.train.state() if isinstance(parts.train, Served) else None,
        "generators": generators[0] if generators else {},
        "generators_of_others": generators[1:],
    }


def _check_losses(state: Mapping[str, Any]) -> None:
    """Raises: NotFiniteError for weights after a loss that is not finite; of rows that were pulled the buffer has told."""
    if "rows" in state:
        check_unread(state["rows"], step=state["step"])


def _check_experiment(before: Any, now: Mapping[str, Any]) -> None:
    if not isinstance(before, dict):
        return
    others = [key for key in changes(before, now) if key in before and key in now and not may_change(key)]
    if others:
        problems = [
            Problem(
                f"{key}={now[key]}", f"the folder's checkpoint is of a run with {key}={before[key]}", "a new folder"
            )
            for key in others
        ]
        raise RunnerError(*problems)


def _put_back(state: dict[str, Any], parts: Parts, progress: Progress, keeper: CheckpointWriter, buffer: Rows) -> None:
    if not all(type(state[key]) is int and state[key] >= 0 for key in NUMBERS):
        raise ValueError("its steps and epochs are no numbers")
    _put_parts_back(state, parts)
    if state.get("loader") is not None and isinstance(parts.train, Served):
        parts.train.load_state(state["loader"])
    buffer.step = progress.step = state["step"]
    buffer.load_state(state["rows"])
    progress.epoch, progress.measured = state["epoch"], state["measured"]
    progress.epochs_without_best, progress.num_pieces = state["epochs_without_best"], state["num_pieces"]
    progress.num_together = int(state.get("num_together", 0))  # unknown to checkpoints from before
    progress.rate, progress.seconds = state["rate"], state["seconds"]
    best = keeper.newest("best")
    if best is None and state["best"]["value"] is not None:
        keeper.notes.append(f"best.pt of step {state['best']['step']} is missing: the best is looked for anew")
    elif best is not None and state["best"]["value"] is not None:
        # of a torn file the one before it, which is less good
        best = best if best["step"] < state["best"]["step"] else state["best"]
        progress.best.value, progress.best.step = best["value"], best["step"]


def _put_parts_back(state: dict[str, Any], parts: Parts) -> None:
    _load_model(parts, parts.model, state["model"])
    begun = [
        {name: value for name, value in group.items() if name != "params"} for group in parts.optimizer.param_groups
    ]
    if parts.shards is None:
        parts.optimizer.load_state_dict(state["optimizer"])
    else:
        parts.shards.load_optimizer(parts.optimizer, state["optimizer"])
    num_steps = parts.limits.num_steps
    if isinstance(parts.schedule, StepSchedule) and state.get("num_steps", num_steps) != num_steps:
        for group, values in zip(parts.optimizer.param_groups, begun, strict=True):
            group.update(values)
        parts.schedule.catch_up(state["step"])
    else:
        parts.schedule.load_state_dict(state["schedule"])
    parts.precision.scaler.load_state_dict(state["scaler"])
    if parts.average is not None:
        _load_model(parts, parts.average.model, state["average"])


def _draw_on(state: dict[str, Any], parts: Parts, ranks: Ranks) -> None:
    generators = [state["generators"], *state.get("generators_of_others", [])]
    if ranks.rank < len(generators):
        backends.set_generator_states(generators[ranks.rank], parts.device)
    else:
        backends.seed_everything(mixed(torch.initial_seed(), state["step"]))
