"""Turns a column, NumPy's or Arrow's, into cells of a text file, values of JSON, or an array: for output_files.py.

A kept column of a table is Arrow's: NumPy has no integer or boolean that is missing, and would round or rename others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np


def texts(values: Any) -> list[Any]:
    """What csv.writer writes; None, which it leaves empty, where a value is missing. float32 in as few digits as tell it
    from its neighbours, not in those of a double."""
    if isinstance(values, np.ndarray):
        return [str(value) for value in values] if values.dtype == np.float32 else values.tolist()
    found = plain(values)
    if str(values.type) == "float":
        return [None if value is None else str(np.float32(value)) for value in found]
    return [json.dumps(value, default=str) if isinstance(value, list | dict) else value for value in found]


def plain(values: Any) -> list[Any]:
    """Python's own values, None where one is missing."""
    found: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    return found


def joined(parts: Sequence[Any]) -> Any:
    """The parts of a column as one array, that np.load reads without pickle.

    NaN and NaT where a number or a date is missing; texts, empty ones there, for what NumPy has no kind for: integers,
    too, where some are missing and one is more than float64 tells from its neighbours.
    """
    if isinstance(parts[0], np.ndarray):
        whole = np.concatenate(parts)
        return whole.astype(str) if whole.dtype == object else whole
    import pyarrow as pa

    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks])
    if pa.types.is_integer(column.type) and column.null_count:
        known = column.drop_null()
        if known.cast(pa.float64(), safe=False).cast(known.type, safe=False).equals(known):
            column = column.cast(pa.float64(), safe=False)
    is_date = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    if not column.null_count or pa.types.is_floating(column.type) or is_date:
        whole = column.to_numpy()
        if whole.dtype != object:
            return whole
    return np.array(["" if value is None else str(value) for value in texts(column)])
