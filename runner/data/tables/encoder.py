"""Describes a table's columns and target as plain values, and encodes rows of Arrow batches by them as floats."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from runner.data.tables.cells import BadValue, Form, UnknownType, as_booleans, as_codes, as_dates, as_numbers, form_of
from runner.data.tables.files import TableFile, TableFrame
from runner.errors import Problem, RunnerError, listed, nearest

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


log = logging.getLogger("runner")

AnyTable = TableFile | TableFrame
KINDS = {"number": "numbers", "boolean": "true and false", "date": "dates (2026-11-21, 2026-11-21 16:45)"}


@dataclass(frozen=True)
class Place:
    """A batch of rows in its file."""

    file: AnyTable
    first: int  # its first row, from 0
    kept: Any = None  # (n,) which of its rows are taken; None for all

    def of(self, row: int) -> str:
        return self.file.place(self.first + (row if self.kept is None else int(self.kept[row])))

    def bad_value(self, name: str, holds: str, bad: BadValue, ways: Sequence[str], otherwise: str) -> RunnerError:
        largest = float(np.finfo(np.float32).max)
        is_finite = isinstance(bad.value, int | float | str) and largest < abs(_number(bad.value)) < float("inf")
        holds = f"float32, in which models compute, ends at {largest:.1e}" if is_finite else f"the column holds {holds}"
        values = [(self, bad.row, bad.value), *((self, row, value) for row, value in bad.others)]
        return RunnerError.suggest(self.file.setting, f"{list_values(name, values)}, and {holds}", ways, otherwise)


class Encoder:
    """Encode rows of tables as floats; count unknown categories and missing values by column."""

    def __init__(self, columns: Columns, *, fix: str = "") -> None:
        self.columns = columns
        self.unknown: dict[str, int] = {}  # by column: rows with a category that training did not know
        self.missing: dict[str, int] = {}  # by column: rows without a value
        self._fix = fix  # help for a value that does not fit
        self._codes = [{text: code for code, text in enumerate(column.categories)} for column in columns.columns]

    def chunks(
        self, files: Sequence[AnyTable], others: Sequence[str] = (), *, complete: bool = False
    ) -> Iterator[tuple[Any, list[Any], Place]]:
        """Yield (n, num_floats) in the columns' type, the columns `others` as tidy Arrow values, and their place, batch by batch.

        complete leaves out rows where one of `others` is missing. Raises: RunnerError for values that don't fit.
        """
        wanted = list(dict.fromkeys([*self.columns.names, *others]))
        for file in files:
            check_names(wanted, file)
            for values, place, _ in tidy_batches([file], wanted, others if complete else ()):
                yield self._encoded(values, place), [values[name] for name in others], place

    def warn_of_unknown(self) -> None:
        for name, count in self.unknown.items():
            rows = "1 row has a category" if count == 1 else f"{count:,} rows have categories"
            log.warning("column %r: %s that training did not know", name, rows)

    def _encoded(self, values: dict[str, Any], place: Place) -> Any:
        num_rows = len(next(iter(values.values())))
        rows = np.empty((num_rows, self.columns.num_floats), self.columns.dtype)
        start = 0
        for column, codes in zip(self.columns.columns, self._codes, strict=True):
            end = start + len(column.sizes)
            try:
                rows[:, start:end] = self._floats(column, values[column.name], codes).reshape(num_rows, -1)
            except BadValue as bad:
                ways = [] if self._fix else [f"data.categorical=[{column.name}]", f"data.drop=[{column.name}]"]
                raise place.bad_value(column.name, KINDS[column.kind], bad, ways, self._fix) from None
            if (is_missing := np.isnan(rows[:, start])).any():
                if self.columns.refuses_missing:
                    raise RunnerError(missing_value(column.name, place, int(is_missing.argmax())))
                self.missing[column.name] = self.missing.get(column.name, 0) + int(is_missing.sum())
            start = end
        return rows

    def _floats(self, column: Column, values: Any, codes: dict[str, int]) -> Any:
        if column.kind == "category":
            found = as_codes(values, codes)
            if count := int((found < 0).sum()):
                self.unknown[column.name] = self.unknown.get(column.name, 0) + count
            return found
        if column.kind == "date":
            return as_dates(values, has_times=column.has_times)
        return as_booleans(values) if column.kind == "boolean" else as_numbers(values) - column.offset


def encode_target(target: TableTarget, values: Sequence[Any], place: Place, dtype: str) -> Any:
    """Return (n,) int64 for classes, else (n, T) in the type. Raises: RunnerError for values that are missing or don't fit."""
    for name, column in zip(target.names, values, strict=True):
        if column.null_count:
            row = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
            raise RunnerError(missing_target(name, place, row))
    if target.kind != "classification":
        pairs = zip(target.names, values, strict=True)
        floats = [_target_floats(target, name, column, place) for name, column in pairs]
        return np.stack(floats, 1).astype(dtype)
    codes = as_codes(values[0], {text: code for code, text in enumerate(target.classes)})
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        problem = f"{place.of(row)}, column {target.names[0]!r}, is {values[0][row].as_py()!r}"
        fix = f"add rows of this class to the training table (it has {', '.join(target.classes[:10])})"
        problem, fix = f"{problem}, a class that the training table lacks", f"{fix}, or remove that line"
        raise RunnerError.of(place.file.setting, problem, fix)
    return codes.astype(np.int64)


def _target_floats(target: TableTarget, name: str, values: Any, place: Place) -> Any:
    is_multilabel = target.kind == "multilabel"
    try:
        return as_booleans(values) if is_multilabel else as_numbers(values)
    except BadValue as bad:
        holds = "labels, 0 or 1" if is_multilabel else "the numbers of a regression"
        ways = ["data.kind=classification"] * (len(target.names) == 1)
        raise place.bad_value(name, holds, bad, ways, f"leave {name} out of `data.target`") from None


def tidy_batches(
    files: Sequence[AnyTable], names: Sequence[str], complete: Sequence[str] = ()
) -> Iterator[tuple[dict[str, Any], Place, int]]:
    """Yield the columns as tidy Arrow values, their place, and how many rows were left out, batch by batch.

    Rows are left out if one of the columns `complete` is missing.
    """
    for file in files:
        first = 0
        for batch in file.batches(names):
            columns = {name: _tidy(batch.column(index), name, file) for index, name in enumerate(names)}
            is_complete = np.ones(batch.num_rows, bool)
            for name in complete:
                is_complete &= columns[name].is_valid().to_numpy(zero_copy_only=False)
            kept = None
            if not is_complete.all():
                kept = np.flatnonzero(is_complete)
                columns = {name: values.take(kept) for name, values in columns.items()}
            yield columns, Place(file, first, kept), batch.num_rows - int(is_complete.sum())
            first += batch.num_rows


def list_values(name: str, values: Sequence[tuple[Place, int, Any]], num: int = 0) -> str:
    """Name a column's bad values with their lines; num: how many there are. Reads a CSV file once per value."""
    (place, row, value), *others = values
    also = [f"{other.of(at).partition(', ')[2]}: {_shown(text)}" for other, at, text in others]
    also += [f"{num - len(values):,} more"] * (num > len(values))
    more = f" (also {', '.join(also)})" if also else ""
    return f"{place.of(row)}, column {name!r}, is {_shown(value)}{more}"


def check_names(wanted: Sequence[str], file: AnyTable) -> None:
    """Raise a RunnerError for columns that the file lacks, with the nearest one it has."""
    there = file.names()
    known = set(there)
    if lacks := [name for name in wanted if name not in known]:
        hits = nearest(lacks[0], there)
        like = f" (is it {' or '.join(map(repr, hits))}?)" if hits else ""
        problem = f"{file.name} has no column {', '.join(map(repr, lacks[:5]))}{like}; it has {listed(there)}"
        fix = "use a file with the columns that the model was trained on, in any order"
        raise RunnerError.of(file.setting, problem, fix, code="unknown-option")


def missing_value(name: str, place: Place, row: int) -> Problem:
    problem = f"{place.of(row)}, column {name!r}, is missing"
    return Problem.suggest("data.missing=refuse", problem, ["data.missing=mean", f"data.drop=[{name}]"])


def missing_target(name: str, place: Place, row: int, *, count: int = 1) -> Problem:
    also = f"; so are {count - 1:,} more" if count > 1 else ""
    problem = f"{place.of(row)}, column {name!r}, is missing, and it is the target{also}"
    fix = "use `data.drop_missing_targets=true` to leave out rows without a target, or another column as `data.target`"
    return Problem(place.file.setting, problem, fix)


def _tidy(values: Any, name: str, file: AnyTable) -> Any:
    try:
        return file.form.tidied(values)
    except UnknownType as error:
        problem = f"column {name!r} of `{file.name}` has values of type {error}, not numbers, texts, dates or booleans"
        raise RunnerError.suggest(file.setting, problem, [f"data.drop=[{name}]"]) from None


def _number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
