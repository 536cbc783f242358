"""Converts inputs and targets of any common type into checked tensors on the host: float32, or classes 0..C-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.config.checks import choice
from runner.data.tables.scan import offset_of
from runner.errors import RunnerError, first_line

KINDS = ("auto", "classification", "regression")
REGRESSION = "floats for a regression (`data.kind=regression` for a file)"
#: tensors that hold more than float32 does
WIDE = (torch.int32, torch.int64, torch.float64)
#: rows that show whether float32 has room for a column's digits
MOST_LOOKED_AT = 10_000
#: torch's kernels have no other unsigned integers than uint8
WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


def to_inputs(
    values: Any,
    *,
    asked: str,
    called: str = "the inputs",
    keep_integers: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return (N, ...) of `dtype`, all finite; (N,) becomes (N, 1). keep_integers: for tokens and bytes. Raises: RunnerError.

    values: a tensor, an array or nested lists of numbers. Memory is shared if nothing has to change.
    """
    array = _numbers(values, asked, called)
    if keep_integers and array.dtype.kind in "iu":
        return to_tensor(array, asked=asked, called=called)
    return _columns_of(array, asked, called, dtype)


def to_tensor(values: Any, *, asked: str, called: str) -> Tensor:
    """Make a tensor of the same shape and type, on the host. Raises: RunnerError for other values than numbers."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = _numbers(values, asked, called)
    return _shared(array.astype(WIDER.get(array.dtype.name, array.dtype.newbyteorder("=")), copy=False))


def to_targets(
    values: Any,
    *,
    asked: str,
    called: str = "the targets",
    kind: str = "auto",
    like: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, tuple[str, ...]]:
    """Return classes, (N,) int64, and their names; or numbers, (N, ...) of `dtype`, and no names. Raises: RunnerError.

    kind: classification, regression, or auto (floats are numbers, all else is classes). Any integers or texts are classes,
    numbered from 0 in sorted order, or as in `like`, the names of another split.
    """
    choice(kind, KINDS, key="data.kind")
    array = _rows_of(values, asked, called)
    if kind == "regression" or (kind == "auto" and array.dtype.kind == "f"):
        if array.dtype.kind not in "fiub":
            problem = f"there are {_kind_in_words(array.dtype)} in {called}, and a regression needs numbers"
            raise RunnerError.of(asked, problem, "use `data.kind=classification`, or targets that are numbers")
        return _columns_of(array, asked, called, dtype), ()
    return _numbered(_one_column(array, asked, called), asked, called, like)


def fall_together(values: Any, *, called: str) -> tuple[str, ...]:
    """Describe the first column of (N,) or (N, F) numbers with more digits than float32 has, by MOST_LOOKED_AT rows."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) and values.dtype in WIDE else values
    array = np.asarray(array) if isinstance(array, list | np.ndarray) else np.empty(0)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize < 4 or array.ndim not in (1, 2) or not array.size:
        return ()
    some = array[:: -(-len(array) // MOST_LOOKED_AT)].astype(np.float64).reshape(-1, array[0].size)
    for column, offset in enumerate(offsets_of(some)):
        if offset:
            where = f"column {column} of {called}" if array.ndim == 2 else called
            spread, step = float(some[:, column].std()), float(np.spacing(np.float32(abs(offset))))
            problem = f"{where}: {offset:,.6g}, and {spread:.3g} apart; float32, in which models compute, has steps of {step:.3g} there"
            return (f"{problem}, and values fall together; less {offset:,.15g} they stay apart",)
    return ()


def offsets_of(some: Any) -> list[float]:  # (n, F) float64
    """Return what to subtract from each column so that float32 keeps its values apart; 0 if nothing is needed."""
    found = []
    with np.errstate(all="ignore"):  # NaN and infinity have no offset, and are an error later
        for column, (mean, spread) in enumerate(zip(some.mean(0).tolist(), some.std(0).tolist(), strict=True)):
            offset, values = offset_of(mean, spread), some[:, column]
            found.append(0.0 if not offset or np.array_equal(values, values.astype(np.float32)) else offset)
    return found


def are_texts(values: Any) -> bool:
    """Return whether targets are names of classes."""
    if isinstance(values, Tensor):
        return False
    first = next(iter(values), None) if hasattr(values, "__iter__") else None
    return isinstance(first, str | bytes)


def to_floats(array: Any, *, asked: str, called: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor of float32 or float64. Raises: RunnerError for values that are infinite in it, or NaN."""
    with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite
        tensor = _shared(array.astype(np.float64 if dtype == torch.float64 else np.float32, copy=False))
    low, high = torch.aminmax(tensor)  # one pass without extra memory; NaN comes through
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = ~torch.isfinite(tensor).flatten(1)
        rows, columns = bad.any(1).nonzero()[:, 0], bad.any(0).nonzero()[:, 0]
        problem = (
            f"there are NaN or infinite values in {called}: {int(bad.sum()):,} in {_count(len(rows), 'row')} and "
            f"{_count(len(columns), 'column')}; the first is in row {int(rows[0])}, column {int(columns[0])}"
        )
        raise RunnerError.of(asked, problem, "correct those rows, or leave them out")
    return tensor


def _columns_of(array: Any, asked: str, called: str, dtype: torch.dtype) -> Tensor:
    return to_floats(array[:, None] if array.ndim == 1 else array, asked=asked, called=called, dtype=dtype)


def _rows_of(values: Any, asked: str, called: str) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # NumPy has no such type
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"no array can be made of {called}: {first_line(error)}"
        raise RunnerError.of(asked, problem, "use rows of the same length, as an array or a tensor") from None
    if array.ndim == 0:
        problem = f"there is a single {type(values).__name__} for {called}, not an array with a row for each example"
        raise RunnerError.of(asked, problem, "use an array or a tensor whose first dimension counts the examples")
    if len(array) == 0:
        raise RunnerError.of(asked, f"there are no rows in {called}", "use a file or a function with at least one row")
    if array.size == 0:
        raise RunnerError.of(
            asked, f"there are no columns in {called}, whose shape is {array.shape}", "use at least one column"
        )
    return array


def _numbers(values: Any, asked: str, called: str) -> Any:
    array = _rows_of(values, asked, called)
    if array.dtype.kind not in "fiub":
        problem = f"there are {_kind_in_words(array.dtype)} in {called}, and a model needs numbers"
        raise RunnerError.of(asked, problem, "convert them to an array of numbers")
    return array


def _one_column(array: Any, asked: str, called: str) -> Any:
    if array.size != len(array):
        problem = f"the shape of {called} is {array.shape}, and a class is one value per row"
        raise RunnerError.of(asked, problem, f"use `targets.argmax(1)` if a 1 marks the class, or {REGRESSION}")
    column = array.reshape(len(array))
    if column.dtype.kind == "f":
        to_floats(column[:, None], asked=asked, called=called)
        if not np.array_equal(column, np.round(column)):
            broken = column[column != np.round(column)][0]
            problem = f"there is {broken} in {called}, and classes are whole numbers or texts"
            raise RunnerError.of(asked, problem, f"use integers or texts as classes, or {REGRESSION}")
        return column.astype(np.int64)
    if column.dtype.kind == "O" and all(isinstance(item, str) for item in column):  # texts, as pandas keeps them
        return column.astype(str)
    if column.dtype.kind not in "iubUST":
        problem = f"there are {_kind_in_words(column.dtype)} in {called}, and classes are whole numbers or texts"
        raise RunnerError.of(asked, problem, "use an array of integers, texts or floats as targets")
    return column


def _numbered(column: Any, asked: str, called: str, like: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]]:
    found, indices = np.unique(column, return_inverse=True)
    names = tuple(item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in found.tolist())
    if like is None:
        return torch.from_numpy(indices.astype(np.int64)), names
    number = {name: index for index, name in enumerate(like)}
    if unknown := [name for name in names if name not in number]:
        problem = f"there are classes in {called} that the training split lacks: {', '.join(unknown[:5])}"
        raise RunnerError.of(asked, problem, "add rows of each class to the training split, or leave these rows out")
    return torch.tensor([number[name] for name in names])[torch.from_numpy(indices.astype(np.int64))], tuple(like)


def _shared(array: Any) -> Tensor:
    """Make a tensor over the array's memory; a copy if it is read-only or not contiguous."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _kind_in_words(dtype: Any) -> str:
    words = {"O": "Python objects", "c": "complex numbers", "M": "dates", "m": "durations"}
    return words.get(dtype.kind, "texts" if dtype.kind in "UST" else str(dtype))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
