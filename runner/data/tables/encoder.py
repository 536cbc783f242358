"""Encodes Arrow batches as rows of float32, by a table's columns: the same for training and prediction.

The columns are plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from runner.data.tables.arrow_values import (
    BadValue,
    UnknownType,
    as_booleans,
    as_codes,
    as_dates,
    as_numbers,
    is_too_large,
    tidy,
)
from runner.data.tables.files import TableFile
from runner.data.tables.frame import TableFrame
from runner.errors import Problem, RunnerError, nearest

Rows = TableFile | TableFrame
MONTHS, WEEKDAYS = 12, 7
WORDS = {"number": "numbers", "boolean": "true and false", "date": "dates (2026-11-21, 2026-11-21 16:45)"}


@dataclass(frozen=True)
class Column:
    """What a column of inputs becomes: a number or boolean one float, a category its number, a date 3 or 4 floats."""

    name: str
    kind: str  # number | boolean | date | category
    categories: tuple[str, ...] = ()  # most frequent first
    has_times: bool = False  # of dates: a fourth float, the hours
    has_missing: bool = False  # in the table that was trained on
    offset: float = 0.0  # of numbers: taken off them while they are float64, where float32 has no room for their digits

    @property
    def sizes(self) -> list[int]:
        """For each float of its: 0 for a number, else how many categories it counts."""
        if self.kind == "date":
            return [0, MONTHS, WEEKDAYS, *([0] if self.has_times else [])]
        return [len(self.categories) if self.kind == "category" else 0]


@dataclass(frozen=True)
class Columns:
    """All inputs of a table."""

    columns: tuple[Column, ...]
    refuses_missing: bool = False

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def sizes(self) -> list[int]:
        return [size for column in self.columns for size in column.sizes]

    @property
    def flagged(self) -> list[int]:
        """Which floats of a row get a 0/1 column that says that they are missing: the first of a column's."""
        starts = np.cumsum([0, *(len(column.sizes) for column in self.columns)]).tolist()
        return [start for column, start in zip(self.columns, starts, strict=False) if column.has_missing]

    @property
    def num_floats(self) -> int:
        return len(self.sizes)

    @property
    def width(self) -> int:
        """Of what the model gets: numbers, a 0/1 column a category, one for each column with missing values."""
        return sum(size or 1 for size in self.sizes) + len(self.flagged)

    def node(self) -> list[dict[str, Any]]:
        found = [asdict(column) | {"categories": list(column.categories)} for column in self.columns]
        return [{key: value for key, value in item.items() if key != "offset" or value} for item in found]


def columns_of(node: Sequence[dict[str, Any]], *, refuses_missing: bool) -> Columns:
    """From Columns.node()."""
    found = tuple(Column(**{**item, "categories": tuple(item["categories"])}) for item in node)
    return Columns(found, refuses_missing)


class Encoder:
    """Encode rows of a table's files as float32; count unknown categories and missing values by column."""

    def __init__(self, columns: Columns, *, fix: str = "") -> None:
        self.columns = columns
        self.unknown: dict[str, int] = {}  # by column: rows with a category that the training table does not have
        self.missing: dict[str, int] = {}  # by column: rows without a value
        self._fix = fix  # help for a value that does not fit
        self._numbers = [{text: index for index, text in enumerate(column.categories)} for column in columns.columns]

    def chunks(
        self, files: Sequence[Rows], others: Sequence[str] = (), *, complete: bool = False
    ) -> Iterator[tuple[Any, list[Any], Place]]:
        """(n, num_floats) float32, the columns `others` as tidy Arrow values, and where the rows stand, batch by batch.

        complete: rows where one of `others` is missing are left out.

        Raises: RunnerError for a column that is not there and for a value that its column can't take, with its line.
        """
        wanted = list(dict.fromkeys([*self.columns.names, *others]))
        for file in files:
            check_names(wanted, file)
            for tidied, place, _ in tidied_batches([file], wanted, others if complete else ()):
                num_rows = len(next(iter(tidied.values())))
                yield self._encoded(tidied, place, num_rows), [tidied[name] for name in others], place

    def _encoded(self, tidied: dict[str, Any], place: Place, num_rows: int) -> Any:
        rows = np.empty((num_rows, self.columns.num_floats), np.float32)
        start = 0
        for column, numbers in zip(self.columns.columns, self._numbers, strict=True):
            end = start + len(column.sizes)
            try:
                found = self._floats(column, tidied[column.name], numbers)
            except BadValue as bad:
                ways = [] if self._fix else [f"data.categorical=[{column.name}]", f"data.drop=[{column.name}]"]
                raise RunnerError(bad_value(column.name, WORDS[column.kind], bad, place, ways, self._fix)) from None
            rows[:, start:end] = found.reshape(num_rows, -1)
            if (is_missing := np.isnan(rows[:, start])).any():
                if self.columns.refuses_missing:
                    raise RunnerError(_missing_value(column.name, place, int(is_missing.argmax())))
                self.missing[column.name] = self.missing.get(column.name, 0) + int(is_missing.sum())
            start = end
        return rows

    def _floats(self, column: Column, values: Any, numbers: dict[str, int]) -> Any:
        if column.kind == "category":
            codes = as_codes(values, numbers)
            if count := int((codes < 0).sum()):
                self.unknown[column.name] = self.unknown.get(column.name, 0) + count
            return codes
        if column.kind == "date":
            return as_dates(values, has_times=column.has_times)
        return as_booleans(values) if column.kind == "boolean" else as_numbers(values) - column.offset


@dataclass(frozen=True)
class Place:
    """Where a batch stands."""

    file: Rows
    first: int  # its first row, from 0
    kept: Any = None  # (n,) which of its rows are taken; None for all

    def of(self, row: int) -> str:
        return self.file.place(self.first + (row if self.kept is None else int(self.kept[row])))


def tidied_batches(
    files: Sequence[Rows], names: Sequence[str], complete: Sequence[str] = ()
) -> Iterator[tuple[dict[str, Any], Place, int]]:
    """The columns as tidy Arrow values, where the rows stand, and how many of them were left out, batch by batch.

    complete: columns that leave a row out where one of them is missing.
    """
    for file in files:
        first = 0
        for batch in file.batches(names):
            place, num_rows = Place(file, first), batch.num_rows
            columns = {name: _tidied_at(batch.column(index), name, place) for index, name in enumerate(names)}
            first += num_rows
            there = np.ones(num_rows, bool)
            for name in complete:
                there &= columns[name].is_valid().to_numpy(zero_copy_only=False)
            if there.all():
                yield columns, place, 0
                continue
            kept = np.flatnonzero(there)
            columns = {name: values.take(kept) for name, values in columns.items()}
            yield columns, Place(file, place.first, kept), num_rows - len(kept)


def _tidied_at(values: Any, name: str, place: Place) -> Any:
    try:
        return place.file.form.tidied(tidy(values))
    except UnknownType as error:
        problem = (
            f"column {name!r} of `{place.file.name}` has values of type {error}, not numbers, texts, dates or booleans"
        )
        raise RunnerError.suggest(place.file.asked, problem, [f"data.drop=[{name}]"]) from None


def bad_value(name: str, holds: str, bad: BadValue, place: Place, ways: Sequence[str], otherwise: str) -> Problem:
    holds = f"the column holds {holds}"
    if is_too_large(bad.value):
        holds = f"float32, in which models compute, ends at {np.finfo(np.float32).max:.1e}"
    found = [(place, bad.row, bad.value), *((place, row, value) for row, value in bad.others)]
    return Problem.suggest(place.file.asked, f"{bad_rows(name, found)}, and {holds}", ways, otherwise)


def bad_rows(name: str, found: Sequence[tuple[Place, int, Any]], num: int = 0) -> str:
    """Name a column's bad values with their lines; num: how many there are. Reads a CSV file once per value."""
    (place, row, value), *others = found
    also = [f"{at.of(other).partition(', ')[2]}: {_shown(text)}" for at, other, text in others]
    also += [f"{num - len(found):,} more"] * (num > len(found))
    listed_too = f" (also {', '.join(also)})" if also else ""
    return f"{place.of(row)}, column {name!r}, is {_shown(value)}{listed_too}"


def check_names(wanted: Sequence[str], file: Rows) -> None:
    """Raises: RunnerError for the columns that the file lacks, with the nearest it has."""
    there = file.names()
    known = set(there)
    if lacks := [name for name in wanted if name not in known]:
        hits = nearest(lacks[0], there)
        like = f" (is it {' or '.join(map(repr, hits))}?)" if hits else ""
        problem = f"{file.name} has no column {', '.join(map(repr, lacks[:5]))}{like}; it has {listed(there)}"
        raise RunnerError.of(
            file.asked,
            problem,
            "use a file with the columns that the model was trained on, in any order",
            code="unknown-option",
        )


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def _missing_value(name: str, place: Place, row: int) -> Problem:
    problem = f"{place.of(row)}, column {name!r}, is missing"
    return Problem.suggest("data.missing=refuse", problem, ["data.missing=mean", f"data.drop=[{name}]"])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
