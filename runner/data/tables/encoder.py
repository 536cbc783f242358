"""Encodes Arrow batches as rows of floats, by a table's columns: the same for training and prediction."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.data.tables.cells import BadValue, UnknownType, as_booleans, as_codes, as_dates, as_numbers
from runner.data.tables.columns import Column, Columns, TableTarget, listed
from runner.data.tables.files import TableFile, TableFrame
from runner.errors import Problem, RunnerError, nearest

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
        return RunnerError.suggest(self.file.asked, f"{list_values(name, values)}, and {holds}", ways, otherwise)


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
        raise RunnerError.of(place.file.asked, problem, fix)
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
        raise RunnerError.of(file.asked, problem, fix, code="unknown-option")


def missing_value(name: str, place: Place, row: int) -> Problem:
    problem = f"{place.of(row)}, column {name!r}, is missing"
    return Problem.suggest("data.missing=refuse", problem, ["data.missing=mean", f"data.drop=[{name}]"])


def missing_target(name: str, place: Place, row: int, *, count: int = 1) -> Problem:
    also = f"; so are {count - 1:,} more" if count > 1 else ""
    problem = f"{place.of(row)}, column {name!r}, is missing, and it is the target{also}"
    fix = "use `data.drop_missing_targets=true` to leave out rows without a target, or another column as `data.target`"
    return Problem(place.file.asked, problem, fix)


def _tidy(values: Any, name: str, file: AnyTable) -> Any:
    try:
        return file.form.tidied(values)
    except UnknownType as error:
        problem = f"column {name!r} of `{file.name}` has values of type {error}, not numbers, texts, dates or booleans"
        raise RunnerError.suggest(file.asked, problem, [f"data.drop=[{name}]"]) from None


def _number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
