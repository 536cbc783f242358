"""Describes a table's columns and target as plain values, and makes DataFrames that fit them."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from runner.data.tables.cells import Form, form_of

READER = "runner.data.TableReader"
NUM_MONTHS, NUM_WEEKDAYS = 12, 7
EPOCH = dt.datetime(1970, 1, 1)


@dataclass(frozen=True)
class Column:
    """An input column. A number or boolean becomes one float, a category its code, a date 3 or 4 floats."""

    name: str
    kind: str  # number | boolean | date | category
    categories: tuple[str, ...] = ()  # most frequent first
    has_times: bool = False  # of a date: the fourth float is the hour
    has_missing: bool = False  # in the training table
    offset: float = 0.0  # of a number: subtracted in float64, where float32 has too few digits

    @property
    def sizes(self) -> list[int]:
        """The number of categories of each of its floats; 0 for a number."""
        if self.kind == "date":
            return [0, NUM_MONTHS, NUM_WEEKDAYS, *([0] if self.has_times else [])]
        return [len(self.categories) if self.kind == "category" else 0]


@dataclass(frozen=True)
class Columns:
    """All input columns of a table."""

    columns: tuple[Column, ...]
    refuses_missing: bool = False
    dtype: str = "float32"  # of rows and targets; float64 with train.precision=fp64

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def sizes(self) -> list[int]:
        return [size for column in self.columns for size in column.sizes]

    @property
    def flagged(self) -> list[int]:
        """The floats of a row whose missing values get a 0/1 column: the first one of a table's column."""
        starts = np.cumsum([0, *(len(column.sizes) for column in self.columns)]).tolist()
        return [start for column, start in zip(self.columns, starts, strict=False) if column.has_missing]

    @property
    def num_floats(self) -> int:
        return len(self.sizes)

    @property
    def width(self) -> int:
        """The model's number of inputs: numbers, a 0/1 column per category, and one per column with missing values."""
        return sum(size or 1 for size in self.sizes) + len(self.flagged)


@dataclass(frozen=True)
class TableTarget:
    """The target columns."""

    names: tuple[str, ...]
    kind: str  # classification | regression | multilabel
    classes: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        return len(self.classes) or len(self.names)


def reader_node(columns: Columns, target: TableTarget, form: Form | None = None) -> dict[str, Any]:
    """Return the node of which build() makes a TableReader. Texts with ${ are hidden from OmegaConf."""
    nodes = [
        {key: value for key, value in asdict(column).items() if key != "offset" or value} for column in columns.columns
    ]
    written = form.node() if form is not None else {}
    return {
        "_target_": READER,
        "columns": _replaced(nodes, "${", "$\0{"),  # no table holds a zero byte
        "target": _replaced(asdict(target), "${", "$\0{"),
        "refuses_missing": columns.refuses_missing,
        **({"dtype": columns.dtype} if columns.dtype != Columns.dtype else {}),
        **({"form": _replaced(written, "${", "$\0{")} if written else {}),
    }


def parts_of(node: Mapping[str, Any]) -> tuple[Columns, TableTarget, Form]:
    """Return the columns, the target and the form of a reader_node(). Imports no torch."""
    columns, target, form = (_replaced(node.get(key), "$\0{", "${") for key in ("columns", "target", "form"))
    made = [Column(**{**column, "categories": tuple(column["categories"])}) for column in columns]
    classes = tuple(target["classes"])
    return (
        Columns(tuple(made), node.get("refuses_missing", False), node.get("dtype", Columns.dtype)),
        TableTarget(tuple(target["names"]), target["kind"], classes),
        form_of(**(form or {})),
    )


def columns_in(node: Mapping[str, Any] | None) -> Columns | None:
    """Return the columns of a reader's node; None for another kind of reader."""
    return parts_of(node)[0] if node is not None and node.get("_target_") == READER else None


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value


def frame_of(columns: Columns, rows: Any) -> Any:  # (n, num_floats)
    """Return a DataFrame as pandas reads a CSV file: numbers, booleans and texts; dates and unknown categories are texts."""
    import pandas

    series, start = {}, 0
    for column in columns.columns:
        end = start + len(column.sizes)
        values = [None if math.isnan(row[0]) else _value(column, row) for row in rows[:, start:end]]
        series[column.name] = pandas.Series(values, dtype="float64" if column.kind == "number" else "object")
        start = end
    return pandas.DataFrame(series)


def _value(column: Column, floats: Any) -> Any:
    if column.kind == "category":
        known = {text.lower() for text in column.categories}
        others = (text for count in itertools.count() if (text := f"other{'?' * count}") not in known)
        return column.categories[int(floats[0])] if floats[0] >= 0 else next(others)
    if column.kind == "boolean":
        return bool(floats[0])
    if column.kind == "number":
        return float(str(floats[0])) + column.offset  # 5.1 and not 5.099999904632568
    if not column.has_times:
        return str((EPOCH + dt.timedelta(round(float(floats[0])))).date())
    days, hours = float(floats[0]), float(floats[3])
    return (EPOCH + dt.timedelta(round(days - hours / 24), hours=hours)).isoformat(" ")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
