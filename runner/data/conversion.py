"""Converts what user-defined data gives into tensors: arrays of any type, and the rows and batches of Datasets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from runner.config.checks import one_of
from runner.device.placement import map_tensors, tensors
from runner.errors import RunnerError, first_line

Kind = Annotated[str, one_of(("auto", "classification", "regression"))]
#: what errors and notes call the parts of a pair
PAIR = ("the inputs", "the targets")
REGRESSION = "floats for a regression (`data.kind=regression` for a file)"
#: torch's kernels have no other unsigned integers than uint8
WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


@dataclass(frozen=True)
class Called:
    """An array in errors: the setting that it comes from, and its name."""

    setting: str
    name: str = "the data"

    def error(self, problem: str, fix: str) -> RunnerError:
        return RunnerError.of(self.setting, problem, fix)


def to_inputs(
    values: Any, called: Called, *, keep_integers: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (N, ...) of `dtype`, all finite; (N,) becomes (N, 1). keep_integers: for tokens and bytes. Raises: RunnerError.

    values: a tensor, an array or nested lists of numbers. Memory is shared if nothing has to change.
    """
    array = _numbers(values, called)
    if keep_integers and array.dtype.kind in "iu":
        return to_tensor(array, called)
    return to_floats(array, called, dtype=dtype)


def to_tensor(values: Any, called: Called) -> Tensor:
    """Make a tensor of the same shape and type, on the host. Raises: RunnerError for other values than numbers."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = _numbers(values, called)
    return _shared(array.astype(WIDER.get(array.dtype.name, array.dtype.newbyteorder("=")), copy=False))


def to_targets(
    values: Any,
    called: Called,
    *,
    kind: str = "auto",
    like: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, tuple[str, ...]]:
    """Return classes, (N,) int64, and their names; or numbers, (N, ...) of `dtype`, and no names. Raises: RunnerError.

    kind: classification, regression, or auto (floats are numbers, all else is classes). Any integers or texts are classes,
    numbered from 0 in sorted order, or as in `like`, the names of another split.
    """
    array = _rows_of(values, called)
    if kind == "regression" or (kind == "auto" and array.dtype.kind == "f"):
        if array.dtype.kind not in "fiub":
            problem = f"there are {_kind_in_words(array.dtype)} in {called.name}, and a regression needs numbers"
            raise called.error(problem, "use `data.kind=classification`, or targets that are numbers")
        return to_floats(array, called, dtype=dtype), ()
    values, indices = np.unique(_one_column(array, called), return_inverse=True)
    names = tuple(item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in values.tolist())
    numbers = torch.from_numpy(indices.astype(np.int64))
    if like is None:
        return numbers, names
    number = {name: index for index, name in enumerate(like)}
    if unknown := [name for name in names if name not in number]:
        problem = f"there are classes in {called.name} that the training split lacks: {', '.join(unknown[:5])}"
        raise called.error(problem, "add rows of each class to the training split, or leave these rows out")
    return torch.tensor([number[name] for name in names])[numbers], tuple(like)


def are_texts(values: Any) -> bool:
    """Return whether targets are names of classes."""
    if isinstance(values, Tensor):
        return False
    first = next(iter(values), None) if hasattr(values, "__iter__") else None
    return isinstance(first, str | bytes)


def to_floats(array: Any, called: Called, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor of float32 or float64, (N,) as (N, 1). Raises: RunnerError for values that are infinite in it, or NaN."""
    array = array[:, None] if array.ndim == 1 else array
    with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite
        tensor = _shared(array.astype(np.float64 if dtype == torch.float64 else np.float32, copy=False))
    low, high = torch.aminmax(tensor)  # one pass without extra memory; NaN comes through
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = ~torch.isfinite(tensor).flatten(1)
        rows, columns = bad.any(1).nonzero()[:, 0], bad.any(0).nonzero()[:, 0]
        problem = (
            f"there are NaN or infinite values in {called.name}: {int(bad.sum()):,} in {_count(len(rows), 'row')} and "
            f"{_count(len(columns), 'column')}; the first is in row {int(rows[0])}, column {int(columns[0])}"
        )
        raise called.error(problem, "correct those rows, or leave them out")
    return tensor


def _rows_of(values: Any, called: Called) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # NumPy has no such type
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"no array can be made of {called.name}: {first_line(error)}"
        raise called.error(problem, "use rows of the same length, as an array or a tensor") from None
    if array.ndim == 0:
        problem = (
            f"there is a single {type(values).__name__} for {called.name}, not an array with a row for each example"
        )
        raise called.error(problem, "use an array or a tensor whose first dimension counts the examples")
    if len(array) == 0:
        problem = f"there are no rows in {called.name}"
        raise called.error(problem, "use a file or a function with at least one row")
    if array.size == 0:
        problem = f"there are no columns in {called.name}, whose shape is {array.shape}"
        raise called.error(problem, "use at least one column")
    return array


def _numbers(values: Any, called: Called) -> Any:
    array = _rows_of(values, called)
    if array.dtype.kind not in "fiub":
        problem = f"there are {_kind_in_words(array.dtype)} in {called.name}, and a model needs numbers"
        raise called.error(problem, "convert them to an array of numbers")
    return array


def _one_column(array: Any, called: Called) -> Any:
    if array.size != len(array):
        problem = f"the shape of {called.name} is {array.shape}, and a class is one value per row"
        raise called.error(problem, f"use `targets.argmax(1)` if a 1 marks the class, or {REGRESSION}")
    column = array.reshape(len(array))
    if column.dtype.kind == "f":
        to_floats(column, called)
        if (broken := column[column != np.round(column)]).size:
            problem = f"there is {broken[0]} in {called.name}, and classes are whole numbers or texts"
            raise called.error(problem, f"use integers or texts as classes, or {REGRESSION}")
        return column.astype(np.int64)
    if column.dtype.kind == "O" and all(isinstance(item, str) for item in column):  # texts, as pandas keeps them
        return column.astype(str)
    if column.dtype.kind not in "iubUST":
        problem = f"there are {_kind_in_words(column.dtype)} in {called.name}, and classes are whole numbers or texts"
        raise called.error(problem, "use an array of integers, texts or floats as targets")
    return column


def _shared(array: Any) -> Tensor:
    """Make a tensor over the array's memory; a copy if it is read-only or not contiguous."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _kind_in_words(dtype: Any) -> str:
    words = {"O": "Python objects", "c": "complex numbers", "M": "dates", "m": "durations"}
    return words.get(dtype.kind, "texts" if dtype.kind in "UST" else str(dtype))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
    names: tuple[str, ...] = PAIR
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


def batch_of(dataset: Any, rows: list[Any], *, setting: str = "data") -> Any:
    """Join rows into a batch by the Dataset's `collate_fn`, or by torch's rules."""
    own = getattr(whole_of(dataset), "collate_fn", None)
    return own(rows) if callable(own) else collate(rows, setting=setting)


def collate(rows: list[Any], *, setting: str = "data") -> Any:
    """Join a Dataset's rows into a batch by torch's rules. Raises: RunnerError for rows that can't be joined."""
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError) as error:
        problem = f"the rows of the Dataset can't be joined into a batch: {first_line(error)}"
        fix = "return tensors, arrays, numbers, tuples or dicts of the same shapes for each row"
        raise RunnerError.of(setting, problem, fix) from error


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
