"""What a model predicts for the examples of a split: collected on the device, then brought to the host at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runner.device.placement import map_tensors, num_rows
from runner.tasks.task import Predicting

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Shown:
    """Some rows, with their inputs: the worst ones first."""

    inputs: Floats  # (K, ...)
    predictions: Floats  # (K, C) or (K, T)
    targets: NDArray[np.generic]  # (K,), (K, C) or (K, T)


@dataclass(frozen=True)
class Plane:
    """What the model says all over the plane of its two inputs, and some rows on it."""

    x: Floats  # (G,)
    y: Floats  # (G,)
    predictions: Floats  # (G, G, C) or (G, G, T), by y and x
    train: tuple[Floats, NDArray[np.generic]] | None  # (N, 2) and the targets
    rows: tuple[Floats, NDArray[np.generic]]  # of the split
    names: tuple[str, str] = ("first input", "second input")


@dataclass(frozen=True)
class Results:
    """What a model said of the rows of a split, and what is so."""

    kind: str  # of the task: multiclass | multilabel | regression | autoencoding | generation
    predictions: Floats  # (N, C) probabilities, or (N, T) values
    targets: NDArray[np.generic]  # (N,) classes, (N, C) of 0 and 1, or (N, T) values
    classes: tuple[str, ...] = ()  # names, by index
    names: tuple[str, ...] = ()  # of the labels or of a regression's numbers
    split: str = "test"
    of: str = ""  # model, data and device, for the titles
    num_rows: int | None = None  # of the whole split, where these are not all
    worst: Shown | None = None
    first: Shown | None = None
    plane: Plane | None = None

    @property
    def title(self) -> str:
        """Model, data, device, split and how many rows."""
        count = f"{len(self.predictions):,}"
        if self.num_rows is not None and self.num_rows > len(self.predictions):
            count += f" of {self.num_rows:,}"
        return ", ".join(filter(None, (self.of, f"{self.split} split, {count} rows")))


MOST_ROWS = 10_000
MOST_NUMBERS = 10_000_000  # of all rows together: fewer rows where each has many
NUM_SHOWN = 16
NUM_RECONSTRUCTED = 8
MOST_POINTS = 600  # of the training split on the plane
GRID = 160  # points a side of the plane
LEAST_ROOM = 1e-4  # margin around the points, relative to their size: float32 resolves GRID points in it

Autocast = Callable[[], AbstractContextManager[Any]]


@torch.no_grad()
def collect(
    model: nn.Module,
    task: Predicting,
    batches: Iterable[Any],
    *,
    split_rows: int,
    autocast: Autocast,
    most_rows: int = MOST_ROWS,
    train: Iterable[Any] | None = None,
) -> Results:
    """Predict examples spread evenly over a split, and keep the inputs of the worst. Waits for the device at the end only.

    Args:
        model: The model.
        task: Its task.
        batches: Of the split, whose classes may come one after the other.
        split_rows: How many examples the split has.
        autocast: The context of a forward pass.
        most_rows: How many to predict at most.
        train: Batches of the training split, for its points on the plane of two inputs (None: without them).
    """
    was_training = model.training
    model.eval()
    said, true, points = list[Tensor](), list[Tensor](), list[Tensor]()
    first: tuple[Tensor, ...] | None = None
    num_first = NUM_RECONSTRUCTED if task.kind == "autoencoding" else 0
    worst: tuple[Tensor, ...] | None = None
    try:
        for predictions, targets, inputs in _spread(model, task, batches, autocast, split_rows, most_rows):
            said.append(predictions)
            true.append(targets)
            if isinstance(inputs, Tensor) and inputs.is_floating_point():
                parts = (inputs, predictions, targets)
                worst = _joined(worst, (*parts, _badness(task.kind, predictions, targets)))
                order = worst[-1].topk(min(num_first or NUM_SHOWN, len(worst[-1]))).indices
                worst = tuple(part.index_select(0, order) for part in worst)
                points += [inputs] if inputs.dim() == 2 and inputs.shape[1] == 2 else []
                if num_first and (first is None or len(first[0]) < num_first):
                    first = tuple(part[:num_first] for part in _joined(first, parts))
        plane = _plane(model, task, torch.cat(points), torch.cat(true), train, autocast) if points else None
        return Results(
            task.kind,
            _host(torch.cat(said)[:most_rows]).astype(np.float32, copy=False),
            _host(torch.cat(true)[:most_rows]),
            worst=_shown(worst),
            first=_shown(first),
            plane=plane,
        )
    finally:
        model.train(was_training)


def _joined(old: tuple[Tensor, ...] | None, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return new if old is None else tuple(torch.cat(pair) for pair in zip(old, new, strict=True))


def _spread(
    model: nn.Module, task: Predicting, batches: Iterable[Any], autocast: Autocast, split_rows: int, most_rows: int
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    step, offset, is_known = max(1, math.ceil(split_rows / most_rows)), 0, False  # offset: of the next row in its batch
    for batch in batches:
        rows = num_rows(batch)
        if offset >= rows > 0:
            offset -= rows
            continue
        found = _predict(model, task, batch if step == 1 else _every(batch, step, offset), autocast)
        if not is_known:  # how many numbers the model says of a row
            more = math.ceil(split_rows / step * max(1, found[0][0].numel()) / MOST_NUMBERS)
            found, step, is_known = _every(found, max(1, more), 0), step * max(1, more), True
        yield found
        offset += -(-(rows - offset) // step) * step - rows


def _every(batch: Any, step: int, offset: int) -> Any:
    rows = num_rows(batch)
    return map_tensors(batch, lambda tensor: tensor[offset::step] if tensor.dim() and len(tensor) == rows else tensor)


def _predict(model: nn.Module, task: Predicting, batch: Any, autocast: Autocast) -> tuple[Tensor, Tensor, Any]:
    with autocast():
        outputs = task.outputs(model, batch)
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        inputs = inputs / 255  # images
    return task.predictions(outputs), task.targets(batch), inputs


def _badness(kind: str, predictions: Tensor, targets: Tensor) -> Tensor:  # (B,)
    if kind == "multiclass" and predictions.dim() == 2:
        return 1 - predictions.gather(1, targets[:, None])[:, 0]
    apart = (predictions - targets).flatten(1).abs()
    return apart.amax(1) if kind == "multilabel" else apart.mean(1)


def _plane(
    model: nn.Module,
    task: Predicting,
    points: Tensor,  # (N, 2)
    targets: Tensor,
    train: Iterable[Any] | None,
    autocast: Autocast,
) -> Plane | None:
    if task.kind not in ("multiclass", "regression") or targets.dim() > 2:
        return None
    trained = _some(train, task) if train is not None else None
    both = _host(torch.cat([points, trained[0]]) if trained else points).astype(np.float64)
    means = np.nan_to_num(both).sum(0) / np.maximum(1, (~np.isnan(both)).sum(0))  # where what is missing is shown
    here = np.where(np.isnan(both), means, both)
    low, high = here.min(0), here.max(0)
    room = np.maximum(0.06 * (high - low), LEAST_ROOM * np.maximum(abs(low), abs(high)))
    room = np.where(room > 0, room, 1.0)
    x, y = (np.linspace(low[axis] - room[axis], high[axis] + room[axis], GRID, dtype=np.float32) for axis in (0, 1))
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)).to(points.device, points.dtype)
    with autocast():
        outputs = task.outputs(model, (grid, None))
    said = _host(task.predictions(outputs)).reshape(GRID, GRID, -1)
    kept = slice(None, None, max(1, math.ceil(len(points) / MOST_POINTS)))
    shown = here.astype(np.float32)
    of_train = (shown[len(points) :], _host(trained[1])) if trained else None
    return Plane(x, y, said, of_train, (shown[: len(points)][kept], _host(targets[kept])))


def _some(batches: Iterable[Any], task: Predicting) -> tuple[Tensor, Tensor]:
    inputs, targets = list[Tensor](), list[Tensor]()
    for batch in batches:
        inputs.append(batch[0])
        targets.append(task.targets(batch))
        if sum(map(num_rows, inputs)) >= MOST_POINTS:
            break
    return torch.cat(inputs)[:MOST_POINTS], torch.cat(targets)[:MOST_POINTS]


def _shown(kept: tuple[Tensor, ...] | None) -> Shown | None:
    if kept is None:
        return None
    inputs, predictions, targets = map(_host, kept[:3])
    return Shown(inputs.astype(np.float32), predictions, targets)


def _host(tensor: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    return found
