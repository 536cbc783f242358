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
    """Some examples with their inputs, the worst first."""

    inputs: Floats  # (K, ...)
    predictions: Floats  # (K, C) or (K, T)
    targets: NDArray[np.generic]  # (K,), (K, C) or (K, T)


@dataclass(frozen=True)
class Plane:
    """A model's predictions on a grid over its two inputs, and some examples."""

    x: Floats  # (G,)
    y: Floats  # (G,)
    predictions: Floats  # (G, G, C), by y and x
    rows: Floats  # (N, 2)
    targets: NDArray[np.generic]  # (N,)


@dataclass(frozen=True)
class Results:
    """Predictions of a split's rows, and their targets."""

    kind: str  # of the task: multiclass | multilabel | regression | autoencoding | generation
    predictions: Floats  # (N, C) probabilities, or (N, T) values
    targets: NDArray[np.generic]  # (N,) classes, (N, C) of 0 and 1, or (N, T) values
    classes: tuple[str, ...] = ()  # names, by index
    names: tuple[str, ...] = ()  # of the labels or of a regression's numbers
    split: str = "test"
    of: str = ""  # model, data and device, for the titles
    num_rows: int | None = None  # of the whole split, where these are not all
    worst: Shown | None = None
    plane: Plane | None = None

    @property
    def title(self) -> str:
        """Model, data, device, split and how many rows."""
        count = f"{len(self.predictions):,}"
        if self.num_rows is not None and self.num_rows > len(self.predictions):
            count += f" of {self.num_rows:,}"
        return ", ".join(filter(None, (self.of, f"{self.split} split, {count} rows")))


MAX_ROWS = 10_000
MAX_NUMBERS = 10_000_000  # of all rows together: fewer rows where each has many
NUM_SHOWN = 16
MAX_POINTS = 600  # on the plane
GRID = 160  # points a side of the plane
MIN_ROOM = 1e-4  # margin around the points, relative to their size: float32 resolves GRID points in it

Autocast = Callable[[], AbstractContextManager[Any]]


@torch.no_grad()
def collect(
    model: nn.Module,
    task: Predicting,
    batches: Iterable[Any],
    *,
    split_rows: int,
    autocast: Autocast,
    most_rows: int = MAX_ROWS,
) -> Results:
    """Predict examples spread evenly over a split, and keep the inputs of the worst. Waits for the device at the end only.

    split_rows: How many examples the split has; its classes may come one after the other. most_rows: How many to predict.
    """
    was_training = model.training
    model.eval()
    predicted, true, points = list[Tensor](), list[Tensor](), list[Tensor]()
    worst: tuple[Tensor, ...] | None = None
    try:
        for predictions, targets, inputs in _spread(model, task, batches, autocast, split_rows, most_rows):
            predicted.append(predictions)
            true.append(targets)
            if isinstance(inputs, Tensor) and inputs.is_floating_point():
                parts = (inputs, predictions, targets, _badness(task.kind, predictions, targets))
                worst = parts if worst is None else tuple(map(torch.cat, zip(worst, parts, strict=True)))
                order = worst[-1].topk(min(NUM_SHOWN, len(worst[-1]))).indices
                worst = tuple(part.index_select(0, order) for part in worst)
                points += [inputs] if inputs.dim() == 2 and inputs.shape[1] == 2 else []
        has_plane = points and task.kind == "multiclass" and true[0].dim() == 1
        return Results(
            task.kind,
            _host(torch.cat(predicted)[:most_rows]).astype(np.float32, copy=False),
            _host(torch.cat(true)[:most_rows]),
            worst=Shown(_host(worst[0]).astype(np.float32), _host(worst[1]), _host(worst[2])) if worst else None,
            plane=_plane(model, task, torch.cat(points), torch.cat(true), autocast) if has_plane else None,
        )
    finally:
        model.train(was_training)


def _spread(
    model: nn.Module, task: Predicting, batches: Iterable[Any], autocast: Autocast, split_rows: int, most_rows: int
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    step, begin, is_known = max(1, math.ceil(split_rows / most_rows)), 0, False
    for batch in batches:
        rows, first = num_rows(batch), -begin % step
        begin += rows
        if first >= rows > 0:
            continue
        shown = _predict(model, task, batch if step == 1 else _every(batch, step, first), autocast)
        if not is_known:  # how many numbers a row's prediction has
            more = max(1, math.ceil(split_rows / step * max(1, shown[0][0].numel()) / MAX_NUMBERS))
            shown, step, is_known = _every(shown, more, 0), step * more, True
        yield shown


def _every(batch: Any, step: int, first: int) -> Any:
    rows = num_rows(batch)
    return map_tensors(batch, lambda tensor: tensor[first::step] if tensor.dim() and len(tensor) == rows else tensor)


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


def _plane(model: nn.Module, task: Predicting, points: Tensor, targets: Tensor, autocast: Autocast) -> Plane | None:
    rows = _host(points).astype(np.float64)  # (N, 2)
    kept = np.flatnonzero(np.isfinite(rows).all(1))
    if not len(kept):
        return None
    low, high = rows[kept].min(0), rows[kept].max(0)
    room = np.maximum(0.06 * (high - low), MIN_ROOM * np.maximum(abs(low), abs(high)))
    room = np.where(room > 0, room, 1.0)
    x, y = np.linspace(low - room, high + room, GRID, dtype=np.float32).T
    grid = torch.from_numpy(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)).to(points.device, points.dtype)
    with autocast():
        outputs = task.outputs(model, (grid, None))
    predicted = _host(task.predictions(outputs)).reshape(GRID, GRID, -1)
    kept = kept[:: max(1, math.ceil(len(kept) / MAX_POINTS))]
    return Plane(x, y, predicted, rows[kept].astype(np.float32), _host(targets)[kept])


def _host(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    return array
