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

EPOCH = dt.datetime(1970, 1, 1)
NUMBERS = ("0", "1", "1.5", "0.5")


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


def made_up(columns: Columns, count: int = 4) -> Any:
    """Return a DataFrame of rows that fit the columns, for a run without an example."""
    import pandas

    texts = {column.name: itertools.islice(itertools.cycle(_texts(column)), count) for column in columns.columns}
    return pandas.DataFrame({name: list(values) for name, values in texts.items()})


def _texts(column: Column) -> list[str]:
    if column.kind == "category":
        return list(column.categories)
    if column.kind == "date":
        return [f"2026-11-2{day} 0{day}:30:00" if column.has_times else f"2026-11-2{day}" for day in range(1, 5)]
    return ["false", "true"] if column.kind == "boolean" else list(NUMBERS)


def _value(column: Column, floats: Any) -> Any:
    if column.kind == "category":
        code = int(floats[0])
        return column.categories[code] if code >= 0 else _unknown_category(column)
    if column.kind == "boolean":
        return bool(floats[0])
    if column.kind == "number":
        return float(str(floats[0])) + column.offset  # 5.1 and not 5.099999904632568
    if not column.has_times:
        return str((EPOCH + dt.timedelta(round(float(floats[0])))).date())
    days, hours = float(floats[0]), float(floats[3])
    return (EPOCH + dt.timedelta(round(days - hours / 24), hours=hours)).isoformat(" ")


def _unknown_category(column: Column) -> str:
    known = {text.lower() for text in column.categories}
    return next(text for count in itertools.count() if (text := f"other{'?' * count}") not in known)


READER = "runner.data.TableReader"
NUM_MONTHS, NUM_WEEKDAYS = 12, 7


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

    def node(self) -> list[dict[str, Any]]:
        nodes = [asdict(column) | {"categories": list(column.categories)} for column in self.columns]
        return [{key: value for key, value in node.items() if key != "offset" or value} for node in nodes]


@dataclass(frozen=True)
class Target:
    """The target columns."""

    names: tuple[str, ...]
    kind: str  # classification | regression | multilabel
    classes: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        return len(self.classes) or len(self.names)


def columns_of(node: Sequence[Mapping[str, Any]], *, refuses_missing: bool, dtype: str = "float32") -> Columns:
    """Return the columns of a reader_node()."""
    columns = [_visible(dict(item)) for item in node]
    made = tuple(Column(**{**item, "categories": tuple(item["categories"])}) for item in columns)
    return Columns(made, refuses_missing, dtype)


def target_of(node: Mapping[str, Any]) -> Target:
    """Return the target of a reader_node()."""
    target = _visible(dict(node))
    return Target(tuple(target["names"]), target["kind"], tuple(target["classes"]))


def form_of_node(node: Mapping[str, Any] | None) -> Form:
    """Return the form of a reader_node()."""
    return form_of(**_visible(dict(node or {})))


def reader_node(columns: Columns, target: Target, form: Form | None = None) -> dict[str, Any]:
    """Return the node of which build() makes a TableReader. Texts with ${ are hidden from OmegaConf."""
    written = _hidden(form.node()) if form is not None else {}
    return {
        "_target_": READER,
        "columns": _hidden(columns.node()),
        "target": _hidden(asdict(target)),
        "refuses_missing": columns.refuses_missing,
        **({"form": written} if written else {}),
        **({"dtype": columns.dtype} if columns.dtype != Columns.dtype else {}),
    }


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reader_node()'s TableReader."""
    return {key: value for key, value in node.items() if key != "_target_"}


def columns_in(node: Mapping[str, Any] | None) -> Columns | None:
    """Return the columns of a reader's node; None for another kind of reader. Imports no torch."""
    if node is None or node.get("_target_") != READER:
        return None
    return columns_of(node["columns"], refuses_missing=node["refuses_missing"], dtype=node.get("dtype", Columns.dtype))


def form_in(node: Mapping[str, Any] | None) -> Form | None:
    """Return the form of a reader's node; None for another kind of reader."""
    return form_of_node(node.get("form")) if node is not None and node.get("_target_") == READER else None


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def _visible(value: Any) -> Any:
    return _mapped(value, "$\0{", "${")


def _hidden(value: Any) -> Any:
    return _mapped(value, "${", "$\0{")  # no table holds a zero byte


def _mapped(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value
