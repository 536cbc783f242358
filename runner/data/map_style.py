"""Finds the sizes and classes of a user's map-style Dataset from its first row alone; collates batches of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from runner.device.placement import map_tensors, tensors
from runner.errors import RunnerError, first_line


@dataclass(frozen=True)
class Told:
    """What a Dataset says of itself. Facts that it does not tell are absent."""

    facts: dict[str, Any]
    labels: Tensor | None  # (N,) int64, from its attribute `targets` or `labels`, as torchvision's sets have it
    classes: tuple[str, ...]  # from its attribute `classes`


def look_at(dataset: Dataset[Any], *, asked: str) -> Told:
    """Reads row 0, once. Raises: RunnerError for a Dataset without a length, without rows or with rows of no known kind."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        problem = f"`{type(dataset).__name__}` is a stream without a length, and rows are drawn by their number"
        raise RunnerError.of(asked, problem, "return a Dataset with `__len__` and `__getitem__`")
    if len(dataset) == 0:
        raise RunnerError.of(asked, f"`{type(dataset).__name__}` has no rows", "return a Dataset with at least one row")
    return told_by(batch_of(dataset, [dataset[0]], asked=asked), dataset, labels=labels_of(dataset))


def told_by(batch: Any, dataset: Any, *, labels: Tensor | None) -> Told:
    """By a batch of it, and what it says of itself. labels: (N,) int64, of all its rows."""
    parts = tensors(batch)
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    targets = tensors(batch[1]) if is_pair else parts[1:2]  # ((x, z), y): z is no target
    whole = _whole(dataset)
    classes = tuple(map(str, getattr(whole, "classes", None) or ()))
    facts: dict[str, Any] = {}
    if parts:
        shape = list(parts[0].shape[1:])
        facts = {"input_shape": shape, "in_features": math.prod(shape)}
    known = labels if whole is dataset else labels_of(whole)  # a part may lack the last class
    num_classes = len(classes) or (int(known.max()) + 1 if known is not None else None)
    if num_classes is not None:
        facts |= {"num_classes": num_classes, "out_features": num_classes}
    elif targets and targets[0].is_floating_point():
        facts |= {"num_classes": None, "out_features": math.prod(targets[0].shape[1:])}
    return Told(facts, labels, classes)


def batch_of(dataset: Any, rows: list[Any], *, asked: str = "data") -> Any:
    """A batch of its rows: by the Dataset's own `collate_fn`, where it has one, else by torch's rules."""
    own = getattr(_whole(dataset), "collate_fn", None)
    return own(rows) if callable(own) else collate(rows, asked=asked)


def collate(rows: list[Any], *, asked: str = "data") -> Any:
    """A batch of a Dataset's rows, by torch's own rules but for doubles: Python's floats become float32, as models are.

    Raises: RunnerError for rows that torch can't put together.
    """
    try:
        batch = default_collate(rows)
    except (TypeError, RuntimeError) as error:
        problem = f"the rows of the Dataset can't be joined into a batch: {first_line(error)}"
        fix = "return tensors, arrays, numbers, tuples or dicts of the same shapes for each row"
        raise RunnerError.of(asked, problem, fix) from error
    return as_models_are(batch)


def as_models_are(batch: Any) -> Any:
    """Its doubles become float32."""
    return map_tensors(batch, lambda tensor: tensor.float() if tensor.dtype == torch.float64 else tensor)


def labels_of(dataset: Any) -> Tensor | None:
    """(N,) int64, the classes of its rows by their numbers, where it has them all at hand."""
    if isinstance(dataset, Subset):  # random_split() makes such, too
        of_all = labels_of(dataset.dataset)
        return None if of_all is None else of_all[torch.as_tensor(dataset.indices)]
    found = [getattr(dataset, name, None) for name in ("targets", "labels")]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        found.append(dataset.tensors[1])
    for each in found:
        try:
            labels = torch.as_tensor(each)
        except (TypeError, ValueError, RuntimeError):
            continue  # boxes, texts, a method: nothing to keep proportions of
        whole = labels.dim() == 1 and not (labels.is_floating_point() or labels.is_complex())
        if whole and len(labels) == len(dataset) and int(labels.min()) >= 0:
            return labels.to(torch.int64)
    return None


def _whole(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
