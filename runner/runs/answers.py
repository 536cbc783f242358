"""Computes what a model says of a batch, by its task, and names the columns of it: labels, probabilities, numbers.

For predict.py. answer() is on the device and does not wait for it, columns() on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.device.placement import map_tensors
from runner.models.card import Card
from runner.runs.load import Trained
from runner.tasks.task import Task, is_predicting

Columns = dict[str, Any]  # NumPy arrays of as many rows, by name


def answer(trained: Trained, batch: Any) -> Any:
    """What the model says of a batch on the device, on the device: by its task where that tells, else its raw outputs.

    Nothing here waits for the device.
    """
    with torch.inference_mode(), trained.precision.autocast():
        task = trained.task
        if is_predicting(task):
            return task.predictions(task.outputs(trained.model, (batch, None)))
        return map_tensors(
            trained.model(batch), lambda tensor: tensor.float() if tensor.is_floating_point() else tensor
        )


def columns(found: Any, task: Task, card: Card) -> Columns:
    """The columns of an answer that lies on the host. What has more dimensions than a table stays one array.

    multiclass: label, probability, p_CLASS; multilabel: p_LABEL; a regression's targets by name; else the raw outputs.
    """
    kind = task.kind if is_predicting(task) else ""
    if not isinstance(found, Tensor):
        named = found.items() if isinstance(found, Mapping) else enumerate(found)
        return {
            name: values for key, part in named for name, values in _numbered(part.numpy(), f"output_{key}", ()).items()
        }
    values = found.numpy()
    if values.ndim == 1:
        values = values[:, None]
    if kind == "multiclass" and values.ndim == 2:
        return _classes(values, card)
    if kind == "multilabel" and values.ndim == 2:
        names = card.targets or card.classes or tuple(map(str, range(values.shape[1])))
        return {f"p_{name}": values[:, number] for number, name in enumerate(names)}
    return _numbered(values, "prediction" if kind else "output", card.targets if kind == "regression" else ())


def _classes(values: Any, card: Card) -> Columns:  # (n, C)
    names = np.array(card.classes or tuple(map(str, range(values.shape[1]))))
    best = values.argmax(1)
    found = {"label": names[best], "probability": values[np.arange(len(values)), best]}
    return found | {f"p_{name}": values[:, number] for number, name in enumerate(names)}


def _numbered(values: Any, called: str, names: tuple[str, ...]) -> Columns:
    if values.ndim != 2:
        return {called: values}
    width = values.shape[1]
    if len(names) != width:
        names = (called,) if width == 1 else tuple(f"{called}_{number}" for number in range(width))
    return {name: values[:, number] for number, name in enumerate(names)}
