"""Finds what each column of table files holds: numbers, booleans, dates or categories. Reads them once or twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner.data.tables.arrow_values import (
    DAY,
    LIKE_A_DATE,
    LIKE_A_NUMBER,
    MOST_NAMED,
    NUMBER,
    BadValue,
    as_timestamps,
    canonical,
    first_not,
    type_of,
)
from runner.data.tables.encoder import Column, Place, bad_rows, tidied_batches
from runner.data.tables.files import TableFile
from runner.data.tables.forms import suggested
from runner.errors import RunnerError

#: texts of a column that are counted at a time: of more, the rarer half is forgotten, so that memory has a limit
MOST_COUNTED = 200_000
#: float32 has 24 bits: whole numbers from here on are rounded, and any number as soon as a spread is so small beside it
ROUNDED, FAR_OFF = 2.0**24, 2.0**12
#: numbers about as large as they are apart lose nothing that a model of float32 could tell
APART = 16


@dataclass
class Moments:
    """Count, mean and squared deviations of columns, chunk by chunk (Chan, Golub and LeVeque, 1983); NaN is left out."""

    num_columns: int
    count: Any = field(init=False)
    mean: Any = field(init=False)
    squares: Any = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.mean, self.squares = (np.zeros(self.num_columns) for _ in range(3))

    def update(self, values: Any) -> None:  # (n, columns)
        values = values.astype(np.float64)
        there = ~np.isnan(values)
        count = there.sum(0)
        mean = np.where(there, values, 0).sum(0) / np.maximum(count, 1)
        squares = (np.where(there, values - mean, 0) ** 2).sum(0)
        total = np.maximum(self.count + count, 1)
        step = mean - self.mean
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count += count

    def deviation(self) -> Any:
        """Standard deviations."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def spread(self) -> Any:
        """The same, and 1 for a column that is the same everywhere, so that it is left as it is."""
        spread = self.deviation()
        return np.where(spread > 1e-7 * np.maximum(np.abs(self.mean), 1e-30), spread, 1.0)


def offset_of(mean: float, spread: float) -> float:
    """What numbers have to be less so that float32 keeps them apart: their mean, rounded; 0 where they are."""
    far = APART if abs(mean) >= ROUNDED else FAR_OFF
    if not (0 < spread * far < abs(mean) < float("inf")):
        return 0.0
    return float(round(mean)) if spread > 1 else mean


def taken_less(name: str, offset: float) -> str:
    """What is said of a column whose offset is taken off."""
    return (
        f"column {name} is taken less {offset:,.15g}: float32, in which models compute, has no room for its digits "
        "(the rows of an exported model are such, too)"
    )


class Tally:
    """What the values of one column are, batch by batch."""

    def __init__(self, name: str, *, counts: bool) -> None:
        self.name, self.counts = name, counts  # counts: each value is counted as a text, from the first row on
        self.rows = self.present = self.numbers = self.like_numbers = self.dates = self.like_dates = self.booleans = 0
        self.types: set[str] = set()
        self.texts: Counter[str] = Counter()
        self.counted = 0
        self.is_cut = False  # some texts are forgotten
        self.has_times = False
        self.first_missing: tuple[Place, int] | None = None
        self.odd: dict[str, list[tuple[Place, int, Any]]] = {}  # by kind: the first values that are not of it
        self.moments = Moments(1)  # of its numbers
        self.last_number: float | None = None
        self.counts_rows = True  # 0, 1, 2, ... or 1, 2, 3, ...

    def update(self, values: Any, place: Place) -> None:
        if values.null_count and self.first_missing is None:
            self.first_missing = place, int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        self.rows += len(values)
        self.present += len(values) - values.null_count
        kind = type_of(values)
        if len(values) > values.null_count:
            self.types.add(kind)
        before = self.numbers + self.dates + self.booleans
        if kind == "text":
            self._look_at_texts(values, place)
        else:
            setattr(self, f"{kind}s", getattr(self, f"{kind}s") + len(values) - values.null_count)
            if kind == "date":
                self._look_at_times(values)
            elif kind == "number":
                self._measure(values)
        is_text = self.numbers + self.dates + self.booleans - before < len(values) - values.null_count
        if self.counts or (is_text and self.counted >= 0):
            self._count(values)

    def kind(self, *ways: str) -> str:
        """Return number, boolean, date or category; "" for a column without values.

        Args:
            ways: What helps with a mixture; without any, what helps with an input.

        Raises:
            RunnerError: The column is a mixture.
        """
        if self.present == 0:
            return ""
        for kind, count, like, words in (
            ("number", self.numbers, self.like_numbers, "numbers"),
            ("date", self.dates, self.like_dates, "dates"),
        ):
            if count == self.present:
                return kind
            if (count + like) * 2 >= self.present and kind in self.odd:
                found = self.odd[kind]
                asked, value = found[0][0].file.asked, found[0][2]
                if forms := suggested(self.texts):
                    problem = f"column {self.name!r} has {'decimal commas' if 'decimal' in forms[0] else 'dates'}, e.g., {value!r}"
                    raise RunnerError.suggest(asked, problem, forms)
                num = self.present - count if kind == "number" else 0
                problem = f"{bad_rows(self.name, found, num)}, and most values of the column are {words}"
                ways = ways or (f"data.categorical=[{self.name}]", f"data.drop=[{self.name}]")
                raise RunnerError.suggest(asked, problem, [*_marks(found), *ways])
        return "boolean" if self.booleans == self.present else "category"

    def is_category(self) -> bool:
        """Return whether its kind is category, False for a mixture."""
        try:
            return self.kind() == "category"
        except RunnerError:
            return False

    def is_row_number(self) -> bool:
        """Return whether the numbers count the rows, as an id column does."""
        return self.counts_rows and self.numbers == self.rows > 2

    def column(self, kind: str, *, most: int) -> Column:
        ranked = sorted(self.texts.items(), key=lambda item: (-item[1], item[0]))[:most]
        texts = tuple(text for text, _ in ranked) if kind == "category" else ()
        offset = self.offset() if kind == "number" else 0.0
        return Column(self.name, kind, texts, self.has_times and kind == "date", self.present < self.rows, offset)

    def offset(self) -> float:
        """What is taken off its numbers so that float32 keeps them apart; 0 where nothing has to be."""
        return offset_of(float(self.moments.mean[0]), float(self.moments.deviation()[0]))

    def _measure(self, values: Any) -> None:
        import pyarrow as pa

        numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        fits = np.abs(numbers) <= np.finfo(np.float32).max  # the encoder reports the others
        self.moments.update(np.where(fits, numbers, np.nan)[:, None])
        before = [] if self.last_number is None else [self.last_number]
        begins = bool(before) or (len(numbers) > 0 and numbers[0] in (0, 1))
        self.counts_rows = self.counts_rows and begins and bool((np.diff([*before, *numbers]) == 1).all())
        self.last_number = float(numbers[-1]) if len(numbers) else self.last_number

    def _look_at_texts(self, values: Any, place: Place) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        count = len(values) - values.null_count
        try:
            self._measure(values.cast(pa.float64()))
            self.numbers += count
            return
        except pa.ArrowInvalid:
            numbers, like = _matches(values, NUMBER), _matches(values, LIKE_A_NUMBER)
            self.numbers, self.like_numbers = self.numbers + numbers, self.like_numbers + max(0, like - numbers)
            self._odd("number", values, NUMBER, place)
        booleans = pc.sum(pc.is_in(pc.utf8_lower(values), value_set=pa.array(["true", "false"]))).as_py() or 0
        self.booleans += booleans
        likely = _matches(values, LIKE_A_DATE)
        if likely:
            try:
                stamps = as_timestamps(values)
                self.dates += count
                self._look_at_times(stamps)
                return
            except BadValue as bad:
                self.like_dates += likely
                self.odd.setdefault("date", [(place, bad.row, bad.value)])
        elif count and booleans < count:
            self._odd("date", values, LIKE_A_DATE, place)

    def _odd(self, kind: str, values: Any, pattern: str, place: Place) -> None:
        if len(found := self.odd.setdefault(kind, [])) < MOST_NAMED:
            row, value, others = first_not(values, pattern)
            found += [(place, row, value), *((place, *other) for other in others)][: MOST_NAMED - len(found)]

    def _look_at_times(self, stamps: Any) -> None:
        import pyarrow as pa

        if not self.has_times:
            micros = stamps.drop_null().cast(pa.int64()).to_numpy(zero_copy_only=False)
            self.has_times = bool((micros % DAY).any())

    def _count(self, values: Any) -> None:
        import pyarrow.compute as pc

        self.counted += len(values) - values.null_count
        for item in pc.value_counts(values.drop_null()).to_pylist():
            self.texts[canonical(item["values"])] += item["counts"]
        if len(self.texts) > MOST_COUNTED:
            self.texts, self.is_cut = Counter(dict(self.texts.most_common(MOST_COUNTED // 2))), True


def scan(
    files: Sequence[TableFile], names: Sequence[str], *, counted: Sequence[str], complete: Sequence[str] = ()
) -> tuple[dict[str, Tally], int]:
    """A tally of each column, and how many rows were left out since one of the columns `complete` is missing there.

    counted: the columns whose values are counted even if they are numbers.
    A column that begins with numbers and turns out to be texts takes a second reading.
    """
    always = set(counted)
    while True:
        tallies = {name: Tally(name, counts=name in always) for name in names}
        num_left_out = 0
        for columns, place, left_out in tidied_batches(files, names, complete):
            num_left_out += left_out
            for name, tally in tallies.items():
                tally.update(columns[name], place)
        missed = [tally for tally in tallies.values() if tally.counted < tally.present and tally.name not in always]
        again = [tally.name for tally in missed if tally.is_category()]
        if not again:
            return tallies, num_left_out
        always.update(again)


def _marks(found: Sequence[tuple[Place, int, Any]]) -> list[str]:
    marks = list(dict.fromkeys(str(value) for _, _, value in found))
    if len(marks) > 3 or any(len(mark) > 12 or re.search(r"[\d']", mark) for mark in marks):
        return []
    quoted = ",".join(f"'{mark}'" for mark in marks)
    return [f'"data.missing_values=[{quoted}]"']


def _matches(values: Any, pattern: str) -> int:
    import pyarrow.compute as pc

    return int(
        np.count_nonzero(pc.match_substring_regex(values, pattern).fill_null(False).to_numpy(zero_copy_only=False))
    )
