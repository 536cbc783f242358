"""Takes the step that a replay has come to, watched operation by operation; the weights are what they were afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.device import backends
from runner.inspection.not_finite import Record, Size, Watch
from runner.inspection.ranges import is_finite
from runner.inspection.tensor_names import Names
from runner.models.with_preprocessing import Prepared
from runner.runs.explain.noticed_task import LossNotFiniteError
from runner.runs.explain.replay import Moment
from runner.training.checkpoint import snapshot

NUM_LARGEST = 5


@dataclass(frozen=True)
class Look:
    """What was seen of a step."""

    origin: Record | None  # the operation that began it; None: the step leaves all finite
    loss: float
    norms: Mapping[str, float]  # of the gradients, by module
    largest: tuple[Size, ...]  # of the forward pass, one for each line
    generators: Mapping[str, object]  # as they were before the step


def look(moment: Moment) -> Look:
    """Takes the moment's step. Some ten times longer than a step, and waits for the device at each operation."""
    parts, task = moment.parts, moment.task
    take = moment.reached.take
    assert take is not None
    model, names, norms = parts.model, _names(moment), dict[str, Tensor]()
    before = snapshot(model.state_dict())
    generators = backends.generator_states(parts.device)
    sound = [weight for weight in (*model.parameters(), *model.buffers()) if is_finite(weight)]
    hooks = [
        parameter.register_post_accumulate_grad_hook(_keeping(norms, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    record, loss = None, math.nan
    watch = task.watch = Watch(model, names)
    try:
        with watch:
            values = take(moment.reached.batches)
        loss = float(next(iter(values.values())))
        found = (watch.record_of(weight) for weight in sound)
        record = next((one for one in found if one is not None), None)
    except LossNotFiniteError as error:
        record, loss = error.record, error.value
    finally:
        task.watch = None
        for hook in hooks:
            hook.remove()
        model.load_state_dict(before)
        parts.optimizer.zero_grad()
    scale = 1.0 if parts.precision.scaler is None else parts.precision.scaler.get_scale()
    prefix = "model." if isinstance(model, Prepared) else ""
    by_module = _by_module({name.removeprefix(prefix): float(norm) / scale for name, norm in norms.items()})
    origin = record.origin() if record is not None else None
    return Look(origin, loss, by_module, _largest(watch.sizes), generators)


def _names(moment: Moment) -> Names:
    names, parts = Names(), moment.parts
    names.model(parts.model)
    names.object(moment.task.task, "task")
    single = len(moment.reached.batches) == 1
    for index, batch in enumerate(moment.reached.batches):
        names.batch(batch, "batch" if single else f"batch {index + 1}")
    names.optimizer(parts.optimizer)
    return names


def _keeping(norms: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    """A hook that keeps the norm of a parameter's gradient, as it is when the last batch was added."""

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[name] = torch.linalg.vector_norm(parameter.grad.detach().float())

    return keep


def _by_module(norms: Mapping[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norm**2
    return {name: math.sqrt(found) for name, found in sorted(squares.items(), key=lambda item: -item[1])}


def _largest(sizes: Sequence[Size]) -> tuple[Size, ...]:
    found: dict[tuple[str, str], Size] = {}
    for size in sorted(sizes, key=lambda one: -one.value):
        found.setdefault((size.name, size.line), size)
    return tuple(found.values())[:NUM_LARGEST]
