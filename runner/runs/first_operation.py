"""`diff --ops`: replays two runs in folders that go, and finds the first operation that did not give the same in both.

Called by cli/commands.py. The steps are the run's own, taken one by one as they are written: nothing is compiled or tracked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from runner.config import override_errors
from runner.config.compose import composed_with, composer, hydra_session
from runner.config.importing import loading
from runner.errors import Fault, RunnerError
from runner.experiment import processes
from runner.experiment.check import check_here
from runner.experiment.given import Given
from runner.inspection.host_reads import HostReads
from runner.inspection.results import Fingerprint, Held, Results, fingerprint_of_all
from runner.inspection.tensor_names import Names
from runner.runs.explain.replay import untracked
from runner.runs.reproduce.compare import differences
from runner.runs.reproduce.recorded import Original
from runner.training.fit import Training

#: watching takes a step some ten times as long: in longer replays the weights after each step tell which one to watch
FEW_STEPS = 20


@dataclass(frozen=True)
class Parting:
    """The first operation that is not the same; a is None where the first run has no more of them in that step."""

    step: int
    number: int  # of the operation in the step, from 0
    a: Held | None
    b: Held | None


def composed(original: Original, overrides: Sequence[str]) -> DictConfig:
    """The run's configuration, with these words, as it is replayed. Raises: RunnerError."""
    compose = composer(["-cd", str(original.folder), "-cn", "rerun"])
    with hydra_session(["runner"]), override_errors.explained(overrides, compose=compose, check=check_here):
        return composed_with(compose, [*overrides, "train.hooks=[]"])


def find(a: DictConfig, b: DictConfig, *, until: int) -> Parting | None:
    """Replays both up to the step `until`, where their curves part; None where they do not part here.

    Raises: RunnerError for what keeps a run from starting, and for one of several processes.
    """
    first = 1 if until <= FEW_STEPS else _first_apart(a, b, until)
    beside = _watched(a, first, until)
    found = _watched(b, first, until, beside=[each.step for each in beside])
    for offset, (one, other) in enumerate(zip(beside, found, strict=False)):
        if other.held is None and len(one.step) == len(other.step):
            continue
        place = len(other.step) if other.held_place is None else other.held_place
        again = _watched(a, first + offset, first + offset, place=place)
        return Parting(first + offset, place, again[0].held if again else None, other.held)
    return None


def as_values(found: Parting) -> dict[str, Any]:
    """The operation in each run, what it was given that differs, and by how much its results do."""
    a, b = found.a, found.b
    values: dict[str, Any] = {"step": found.step, "operation_of_step": found.number}
    values |= {
        letter: {"name": each.name, "phase": each.phase, "line": each.line, "module": each.module} if each else None
        for letter, each in (("a", a), ("b", b))
    }
    if a is None or b is None or a.name != b.name:
        return values
    given = [(name, _apart(one, other)) for (name, one), (_, other) in zip(a.inputs, b.inputs, strict=False)]
    keys = [key for key in a.settings if a.settings[key] != b.settings.get(key)]
    return values | {
        "given": [{"what": name, "differs_by": apart} for name, apart in given if apart],
        "settings": [{"what": key, "a": a.settings[key], "b": b.settings.get(key)} for key in keys],
        "draws": a.draws,
        "gave": list(filter(None, (_apart(one, other) for one, other in zip(a.outputs, b.outputs, strict=False)))),
    }


def in_words(values: dict[str, Any]) -> str:
    """What as_values() has, as lines."""
    a, b = values["a"], values["b"]
    if a is None or b is None or a["name"] != b["name"]:
        does = [
            f"{name} {_where(each)}" if each else f"{name} has no more of them"
            for name, each in zip("AB", (a, b), strict=True)
        ]
        return f"the operations are not the same from step {values['step']} on: {does[0]}; {does[1]}"
    why = [f"{each['what']} is {each['a']} in A and {each['b']} in B" for each in values["settings"]]
    why += [f"it is given another {each['what']}: {each['differs_by']}" for each in values["given"]]
    lines = [f"the first operation that parts: step {values['step']}, {_where(b)}"]
    same = "it is given the same in both"
    lines += why or [
        f"{same}, and draws other numbers: another seed, or more were drawn before"
        if values["draws"]
        else f"{same}, and computes something else: by another kernel, or number of threads"
    ]
    return "\n  ".join([*lines, f"it gives {'; '.join(values['gave'][:3])}"])


def _where(each: dict[str, Any]) -> str:
    module = f" in {each['module']}" if each["module"] else ""
    return f"{each['phase']}: {each['name']} at {each['line']}{module}"


def _apart(one: Tensor, other: Tensor) -> str:
    """How two tensors differ, in words; "" for the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        a, b = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (one, other))
        return f"{a} in A, {b} in B"
    if fingerprint_of_all([one]) == fingerprint_of_all([other]):
        return ""
    if one.is_complex():
        return "other values"
    apart = differences(*(each.reshape(-1).cpu().double().numpy() for each in (one, other)))
    return f"{int((apart > 0).sum()):,} of {len(apart):,} values, by up to {apart.max():.1e}"


def _watched(
    cfg: DictConfig,
    first: int,
    last: int,
    *,
    beside: Sequence[list[Fingerprint]] | None = None,
    place: int | None = None,
) -> list[Results]:
    """What the operations of the steps `first` to `last` gave; ends with the first step where one is held."""
    found: list[Results] = []
    with _replayed(cfg) as (training, steps):
        names = Names()
        for number in range(1, last + 1):
            if number < first:
                next(steps, None)
                continue
            names.model(training.parts.model)
            optimizer = training.parts.optimizer
            for each in getattr(optimizer, "each", {"": optimizer}).values():
                names.optimizer(each)
            results = Results(names, beside=beside[number - first] if beside else None, place=place)
            with HostReads(training.parts.device, observers=[results]):
                next(steps, None)
            found.append(results)
            if results.held is not None:
                break
    return found


def _first_apart(a: DictConfig, b: DictConfig, until: int) -> int:
    """The first step after which their weights are not the same."""
    states: list[list[Fingerprint]] = []
    for cfg in (a, b):
        with _replayed(cfg) as (training, steps):
            states.append([])
            for _ in range(until):
                next(steps, None)
                states[-1].append(fingerprint_of_all(training.parts.model.state_dict().values()))
    return next((number for number, (one, other) in enumerate(zip(*states, strict=True), 1) if one != other), until)


@contextmanager
def _replayed(cfg: DictConfig) -> Iterator[tuple[Training, Iterator[None]]]:
    """The run's training before its first step, and its steps: one for each next()."""
    with loading():
        checked = check_here(cfg)
    choices = processes.devices_here(cfg, checked, None, given=Given())
    if len(choices) > 1:
        asked, fix = f"diff --ops of a run in {len(choices)} processes", "--ops train.num_processes=1"
        raise RunnerError(Fault(asked, "one process can be watched", fix))
    with untracked(cfg, torch.device(choices[0].here)) as training, closing(training.train()) as steps:
        next(steps, None)  # to where the first step begins
        yield training, steps
