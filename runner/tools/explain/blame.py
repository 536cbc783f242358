"""Find the rows of a batch that caused a non-finite value, by forward passes over parts of it; for a spike, the loss of each row.

A row is named if the step without it is finite, and a step with only this row is not. Each pass has the weights and the
random generators from before the step, and a backward pass if the loss does not show the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.device import backends
from runner.device.placement import map_tensors, num_rows
from runner.tools.explain.not_finite import NotFiniteOperation
from runner.tools.explain.replay import Moment
from runner.training.optimizer import Turns

#: parts of a batch that are tried first; if each part is bad, no row is named
NUM_PARTS = 8
MAX_TRIES = 200
#: batch of the step, row in it, and its loss, if that was computed
Picked = tuple[int, int, float | None]


@dataclass(frozen=True)
class Blame:
    """The rows that caused a value.

    Attributes:
        batch: The index of the batch in the step.
        is_sure: Whether the step is finite without the rows, and not finite with only them.
        of_all: Whether every part of the batch causes it.
    """

    rows: tuple[int, ...]
    batch: int = 0
    is_sure: bool = False
    of_all: bool = False


def blame(moment: Moment, origin: NotFiniteOperation, generators: Mapping[str, Any], *, loss: float) -> Blame:
    """Find the rows that caused the value of an operation; none for the optimizer's operations, or if every row causes it.

    loss: of the step. If it is finite (a torch.where hides the value), the gradients are checked.
    """
    parts = moment.parts
    if origin.phase == "optimizer" or isinstance(parts.optimizer, Turns):
        return Blame(())
    trial = _Trial(moment, generators, goes_back=origin.phase == "backward" or math.isfinite(loss))
    for index, batch in enumerate(moment.reached.batches):
        try:
            if not trial.is_finite(batch):
                return _of_batch(trial, batch, index, _suspects(origin, num_rows(batch)))
        except Exception:  # a model that does not accept a part of a batch
            rows = _suspects(origin, num_rows(batch))
            return Blame(rows if len(moment.reached.batches) == 1 else ())
    return Blame(())


def _of_batch(trial: _Trial, batch: Any, index: int, suspects: tuple[int, ...]) -> Blame:
    count = num_rows(batch)
    everything = range(count)
    try:
        if suspects and len(suspects) < count and trial.blames(batch, suspects, everything):
            return Blame(suspects, index, is_sure=True)
        size = max(1, -(-count // NUM_PARTS))
        parts = [everything[at : at + size] for at in range(0, count, size)]
        bad = [part for part in parts if not trial.is_finite(chosen(batch, part))]
        if len(bad) == len(parts):
            return Blame((), index, of_all=True)
        found = [row for part in bad for row in trial.halved(batch, part)]
        if found and trial.blames(batch, found, everything):
            return Blame(tuple(found), index, is_sure=True)
    except _EnoughError:
        pass
    except Exception:  # a layer that does not accept a single row
        return Blame(suspects if len(suspects) < count else (), index)
    return Blame((), index)


class _EnoughError(Exception):
    """Too many passes."""


class _Trial:
    def __init__(self, moment: Moment, generators: Mapping[str, Any], *, goes_back: bool) -> None:
        parts = self._parts = moment.parts
        self._task = parts.task
        self._generators, self._goes_back, self._left = generators, goes_back, MAX_TRIES
        self._parameters = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]

    def is_finite(self, batch: Any) -> bool:
        self._left -= 1
        if self._left < 0:
            raise _EnoughError
        parts = self._parts
        buffers = [buffer.clone() for buffer in parts.model.buffers()]
        backends.set_generator_states(self._generators, parts.device)
        try:
            with torch.set_grad_enabled(self._goes_back), parts.precision.autocast():
                loss = next(iter(self._task(parts.model, batch).values()))
            found = [loss]
            if self._goes_back:
                found += torch.autograd.grad(loss, self._parameters, allow_unused=True)
        finally:
            with torch.no_grad():
                for buffer, before in zip(parts.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
        return all(bool(tensor.isfinite().all()) for tensor in found if tensor is not None)

    def blames(self, batch: Any, rows: Sequence[int], everything: Sequence[int]) -> bool:
        rest = [row for row in everything if row not in set(rows)]
        return not self.is_finite(chosen(batch, rows)) and self.is_finite(chosen(batch, rest))

    def halved(self, batch: Any, rows: Sequence[int]) -> list[int]:
        if len(rows) == 1:
            return list(rows)
        half = len(rows) // 2
        parts = [part for part in (rows[:half], rows[half:]) if not self.is_finite(chosen(batch, part))]
        return [row for part in parts for row in self.halved(batch, part)]


def chosen(batch: Any, rows: Sequence[int]) -> Any:
    """Return these rows of a batch. Tensors with another first dimension stay complete."""
    count = num_rows(batch)

    def choose(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != count:
            return tensor
        return tensor.index_select(0, torch.tensor(list(rows), device=tensor.device))

    return map_tensors(batch, choose)


def _suspects(origin: NotFiniteOperation, count: int) -> tuple[int, ...]:
    bad = origin.rows_not_finite  # of the operation's output, whose first dimension may be a multiple of the batch
    if not count or not len(bad) or len(bad) % count:
        return ()
    return tuple(bad.view(count, -1).any(1).nonzero().flatten().tolist())


def losses(moment: Moment) -> list[Picked]:
    """Return each row with its own loss in eval mode, the largest first; [] if the task does not accept a single row."""
    parts, found = moment.parts, list[Picked]()
    model = parts.model
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), parts.precision.autocast():
            for index, batch in enumerate(moment.reached.batches):
                values = [
                    next(iter(parts.task(model, chosen(batch, [row])).values())) for row in range(num_rows(batch))
                ]
                found += [(index, row, loss) for row, loss in enumerate(torch.stack(values).tolist())]
    except Exception:  # a task that does not accept a single row
        return []
    finally:
        for module, mode in modes.items():
            module.training = mode
    return sorted(found, key=lambda one: -(one[2] or 0.0))
