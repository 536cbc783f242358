"""Joins the rows of user-defined Datasets into batches, converts them, and finds their labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from runner.device.placement import map_tensors, tensors
from runner.errors import RunnerError, first_line

#: types that a model's precision replaces
FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Conversion:
    """The changes of the tensors of user-defined data, in any container.

    The default is what the runner's tasks need; a custom task gets tensors as they are, except for the precision.
    """

    dtype: torch.dtype = torch.float32  # of float32 and float64 tensors; float64 with train.precision=fp64
    has_columns: bool = True  # inputs and targets of one float per example become (B, 1); classes are numbered from 0
    keeps_integers: bool = False  # of inputs that are arrays: tokens, bytes

    def __call__(self, batch: Any) -> Any:
        batch = self.cast(batch)
        if not self.has_columns or not is_pair(batch):
            return batch
        inputs, targets = map(_as_columns, batch)
        return batch if inputs is batch[0] and targets is batch[1] else type(batch)((inputs, targets))

    def cast(self, tree: Any) -> Any:
        return map_tensors(tree, lambda tensor: tensor.to(self.dtype) if tensor.dtype in FLOATS else tensor)


#: for the runner's tasks in float32
STANDARD = Conversion()


def _as_columns(part: Any) -> Any:
    is_flat = isinstance(part, Tensor) and part.dim() == 1 and part.is_floating_point()
    return part[:, None] if is_flat else part


def is_pair(batch: Any) -> bool:
    return type(batch) in (list, tuple) and len(batch) == 2


def changes(before: Any, after: Any) -> tuple[str, ...]:
    """Describe what a conversion changed: "the targets, (N,) float64, are given as (N, 1) float32"."""
    names: tuple[str, ...] = ("the inputs", "the targets")
    if not is_pair(after):
        names, before, after = ("the data",), (before,), (after,)
    lines: dict[str, None] = {}
    for called, old, new in zip(names, before, after, strict=True):
        olds = [old] if isinstance(new, Tensor) else tensors(old)
        for then, now in zip(map(_form, olds), map(_form, tensors(new)), strict=True):
            if then and now and then != now:
                lines[f"{called}, {then}, are given as {now}"] = None
    return tuple(lines)


def _form(values: Any) -> str:
    """Return, e.g., "(N, 3) float32"; "" for other objects and texts."""
    shape, dtype = getattr(values, "shape", None), str(getattr(values, "dtype", "")).removeprefix("torch.")
    if shape is None or not re.match("float|bfloat|int|uint|bool", dtype):
        return ""
    return f"({', '.join(['N', *map(str, shape[1:])])}{',' * (len(shape) == 1)}) {dtype}"


class Rows(Dataset[Any]):
    """A list of examples as a Dataset."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class BatchDataset(Dataset[Any]):
    """A Dataset that reads a batch in one piece: a subclass defines `__getitems__`, which returns a tuple."""

    def __getitems__(self, indices: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.__getitems__([index]))

    def collate_fn(self, rows: Any) -> Any:
        """Return a batch of `__getitems__` as it is; join single rows."""
        return rows if isinstance(rows, tuple) else tuple(default_collate(rows))


def batch_of(dataset: Any, rows: list[Any], *, asked: str = "data") -> Any:
    """Join rows into a batch by the Dataset's `collate_fn`, or by torch's rules."""
    own = getattr(whole_of(dataset), "collate_fn", None)
    return own(rows) if callable(own) else collate(rows, asked=asked)


def collate(rows: list[Any], *, asked: str = "data") -> Any:
    """Join a Dataset's rows into a batch by torch's rules. Raises: RunnerError for rows that can't be joined."""
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError) as error:
        problem = f"the rows of the Dataset can't be joined into a batch: {first_line(error)}"
        fix = "return tensors, arrays, numbers, tuples or dicts of the same shapes for each row"
        raise RunnerError.of(asked, problem, fix) from error


def labels_of(dataset: Any) -> Tensor | None:
    """Return (N,) int64, the classes of all rows, if the Dataset has them as an attribute or a tensor."""
    if isinstance(dataset, Subset):  # as of random_split()
        of_all = labels_of(dataset.dataset)
        return None if of_all is None else of_all[torch.as_tensor(dataset.indices)]
    found = [getattr(dataset, name, None) for name in ("targets", "labels")]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        found.append(dataset.tensors[1])
    for each in found:
        try:
            labels = torch.as_tensor(each)
        except (TypeError, ValueError, RuntimeError):
            continue  # boxes, texts, a method
        whole = labels.dim() == 1 and not (labels.is_floating_point() or labels.is_complex())
        if whole and len(labels) == len(dataset) and int(labels.min()) >= 0:
            return labels.to(torch.int64)
    return None


def whole_of(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
