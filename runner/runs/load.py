"""Load a run's model with its best weights, its task and its precision on a device.

For `evaluate`, `predict`, `export`, `serve` and `register`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from runner.config.checks import choice
from runner.config.identity import key_of
from runner.config.instantiate import build
from runner.config.schema import PRECISIONS
from runner.config.secrets import filled_in
from runner.device import Choice, check_precision, choose, probe
from runner.device.placement import place
from runner.device.precision import Precision, default_type, make_precision, number_type
from runner.errors import RunnerError, at_once, first_line
from runner.experiment.check import composed
from runner.experiment.directory import BEST, RERUN, Run
from runner.experiment.terminal import short
from runner.models.card import Card, read_card
from runner.models.weights import load_trained
from runner.tasks.task import Task
from runner.training import checkpoint
from runner.training.carried_state import CarriedState
from runner.version import __version__

RESTORE = "restore the file as the run wrote it"


@dataclass(frozen=True)
class Trained:
    """A run's loaded model."""

    run: Run
    card: Card
    model: nn.Module  # in eval mode, on `device`
    task: Task
    choice: Choice
    precision: Precision
    step: int  # of the weights
    notes: tuple[str, ...]  # for the user

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def device(self) -> torch.device:
        return torch.device(self.choice.here)

    @property
    def title(self) -> str:
        which = "its best weights" if self.run.weights == BEST else "its weights"
        return f"{short(self.folder)}, {which}, of step {self.step:,}"


def open_run(
    run: Run, *, device: Choice | Any = None, precision: str | None = None, uses_autocast: bool = True
) -> Trained:
    """Build the module of model.json, and load the weights strictly, on the device.

    Args:
        run: From find_trained().
        device: As in `device=` (None: auto), or already chosen.
        precision: As in `train.precision=` (None: the run's).
        uses_autocast: False computes in the type of the weights.

    Raises:
        RunnerError: If the run has no best weights or other weights, the device is missing, or a part is not allowed.
    """
    state, notes = _state(run)
    card = read_card(run.folder)
    recorded = _precision_of(run.folder)
    name = choice(precision or recorded, PRECISIONS, key="train.precision")
    dtype = number_type(name)
    is_cast = torch.float64 in (dtype, number_type(recorded))  # else float64 is the user's own choice
    if not uses_autocast:
        name = "fp64" if dtype == torch.float64 else "fp32"
    if not isinstance(device, Choice):
        hardware = probe()
        device = choose("auto" if device is None else device, hardware)
        name = check_precision(name, device.here, hardware)
    there = torch.device(device.here)
    # a checkpoint for resuming may also have averaged weights, which are the ones to evaluate
    kept = state.get("average") or state["model"]
    model = _with_weights(built(card.model, "model", run.folder), kept, run.folder / run.weights)
    model = place(model.to(dtype) if is_cast else model, there).eval()
    with default_type(dtype):
        task = built(card.task, "task", run.folder)
    if isinstance(task, nn.Module):
        task = place(task.to(dtype) if is_cast else task, there)
    carried = state.get("carried") or {}  # of each process, or of the one that wrote it
    CarriedState(model, task, device=there).load_state(carried[0] if isinstance(carried, list) else carried)
    precise = make_precision(name, device=there)
    return Trained(run, card, model, task, device, precise, int(state.get("step") or 0), notes)


def open_on_cpu(run: Run) -> Trained:
    """Load a model to write it elsewhere: on the CPU, in the type of its weights. Raises: as open_run()."""
    return open_run(run, device="cpu", uses_autocast=False)


def computing(overrides: Sequence[str]) -> tuple[Any, str | None]:
    """Return device and train.precision of the overrides, for open_run(). Raises: RunnerError for a wrong or missing one."""
    device, precision = _last_value(overrides, "device"), _last_value(overrides, "train.precision")
    at_once(
        lambda: device is None or choose(device, probe()),
        lambda: precision is None or choice(precision, PRECISIONS, key="train.precision"),
    )
    return device, precision


def built(node: dict[str, Any], key: str, folder: Path) -> Any:
    """Build a node of the card, within the allow-list. Raises: RunnerError."""
    try:
        return build(filled_in(node), key=key)
    except KeyError as error:
        problem = f"the run's `{key}` uses the environment variable {error}, which is not set"
        fix = f"run `export {str(error).strip(chr(39))}=...`"
        raise RunnerError.of(str(folder / "model.json"), problem, fix) from None


def _state(run: Run) -> tuple[dict[str, Any], tuple[str, ...]]:
    summary, file = run.summary, run.folder / run.weights
    status = summary.status or "killed, without a summary"
    if not file.is_file():
        why = f" ({summary.error})" if summary.error else ""
        problem = f"the run has no `{BEST}`: its status is {status}{why}, before the first evaluation"
        other = "" if status == "failed" else f"run `resume {shlex.quote(short(run.folder))}`, or "
        raise RunnerError.of(short(run.folder), problem, f"{other}use a finished run")
    state = checkpoint.load(file)
    if not isinstance(state.get("model"), dict):
        raise RunnerError.of(str(file), "the file contains no weights of a model", RESTORE)
    notes = []
    if status not in ("finished", "pruned") and run.weights == BEST:
        notes.append(f"the run's status is {status}; these are the best weights that it reached")
    if (then := summary.versions.get("runner")) not in (None, __version__):
        notes.append(f"the run was made with runner {then}; this is {__version__}")
    return state, tuple(notes)


def _with_weights(model: nn.Module, weights: dict[str, Any], file: Path) -> nn.Module:
    try:
        load_trained(model, weights)
    except Exception as error:  # a checkpoint of another program may contain anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        problem = f"the weights don't belong to the model in `model.json`: {' '.join(lines[1:3] or lines[:1])}"
        fix = "restore both files as the run wrote them, and the model's code"
        raise RunnerError.of(str(file), problem, fix) from error
    return model


def _precision_of(folder: Path) -> str:
    try:
        return str(OmegaConf.select(OmegaConf.load(folder / RERUN), "train.precision") or "fp32")
    except Exception as error:  # of YAML or OmegaConf
        problem = f"the file can't be read: {first_line(error)}"
        raise RunnerError.of(str(folder / RERUN), problem, RESTORE) from None


def configuration_of(folder: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of a run with other values; `data=NAME` takes all of the data from that file.

    Raises: RunnerError with everything that is wrong.
    """
    of_data = [each for each in overrides if key_of(each) == "data" or key_of(each).startswith("data.")]
    is_another_file = any(key_of(each) == "data" for each in of_data)
    others = [each for each in overrides if each not in of_data] if is_another_file else list(overrides)
    cfg, _ = composed(["-cd", str(folder), "-cn", "rerun"], [*others, "tracking.enabled=false"])  # no run comes of it
    if is_another_file:
        other, _ = composed([], of_data)
        with open_dict(cfg):
            cfg.data = OmegaConf.to_container(other.data, resolve=False)
    return cfg


def _last_value(overrides: Sequence[str], key: str) -> Any:
    values = [each.lstrip("+") for each in overrides if key_of(each) == key and each[0] != "~"]
    try:
        return OmegaConf.select(OmegaConf.from_dotlist([values[-1]]), key) if values else None
    except Exception as error:  # OmegaConf's or YAML's
        problem = f"the value can't be read: {first_line(error)}"
        raise RunnerError.of(values[-1], problem, f"put it in quotes: `'{key}=...'`") from None
