"""Finds what each column of table files holds: numbers, booleans, dates or categories. Reads them once or twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner.data.tables import cells
from runner.data.tables.cells import DAY_MICROSECONDS, LIKE_A_DATE, LIKE_A_NUMBER, MAX_NAMED, NUMBER, BadValue
from runner.data.tables.encoder import Column, Place, list_values, tidy_batches
from runner.data.tables.files import TableFile
from runner.errors import RunnerError

#: texts of a column that are counted; of more, the rarer half is dropped, to limit the memory
MAX_COUNTED = 200_000
#: float32 rounds whole numbers from here on, and any number whose spread is this much smaller than its mean
ROUNDED, FAR_OFF = 2.0**24, 2.0**12
#: numbers whose mean is at most this many times their spread lose nothing that matters
APART = 16


@dataclass
class Moments:
    """Count, mean and squared deviations of columns, chunk by chunk (Chan, Golub and LeVeque, 1983), without NaN."""

    num_columns: int
    count: Any = field(init=False)
    mean: Any = field(init=False)
    squares: Any = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.mean, self.squares = (np.zeros(self.num_columns) for _ in range(3))

    def update(self, values: Any) -> None:  # (n, columns)
        values = values.astype(np.float64)
        is_present = ~np.isnan(values)
        count = is_present.sum(0)
        mean = np.where(is_present, values, 0).sum(0) / np.maximum(count, 1)
        squares = (np.where(is_present, values - mean, 0) ** 2).sum(0)
        total = np.maximum(self.count + count, 1)
        step = mean - self.mean
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count += count

    def deviation(self) -> Any:
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def spread(self) -> Any:
        """Return standard deviations, and 1 for a constant column."""
        spread = self.deviation()
        return np.where(spread > 1e-7 * np.maximum(np.abs(self.mean), 1e-30), spread, 1.0)


def offset_note(name: str, offset: float) -> str:
    return (
        f"column {name} is taken less {offset:,.15g}: float32, in which models compute, has no room for its digits "
        "(the rows of an exported model are such, too)"
    )


class Tally:
    """What the values of one column are, batch by batch."""

    def __init__(self, name: str, *, counts: bool) -> None:
        self.name, self.counts = name, counts  # counts: each value is counted as a text, numbers too
        self.rows = self.present = self.counted = 0
        self.nums: Counter[str] = Counter()  # values by kind: number, date, boolean
        self.likely: Counter[str] = Counter()  # texts that look like a number or a date but can't be read as one
        self.texts: Counter[str] = Counter()
        self.is_cut = False  # some texts were dropped
        self.has_times = False
        self.first_missing: tuple[Place, int] | None = None
        self.odd: dict[str, list[tuple[Place, int, Any]]] = {}  # by kind: the first values of another kind
        self._moments = Moments(1)  # of its numbers

    def update(self, values: Any, place: Place) -> None:
        if values.null_count and self.first_missing is None:
            self.first_missing = place, int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        num = len(values) - values.null_count
        self.rows, self.present = self.rows + len(values), self.present + num
        kind, before = cells.type_of(values), self.nums.total()
        if kind == "text":
            self._read_texts(values, place, num)
        else:
            self._add(kind, values, num)
        if self.counts or self.nums.total() - before < num:
            self._count(values)

    def kind(self, *ways: str) -> str:
        """Return number, boolean, date or category; "" without values. Raises: RunnerError for a mixture, with `ways`."""
        if self.present == 0:
            return ""
        for kind in ("number", "date"):
            if self.nums[kind] == self.present:
                return kind
            if (self.nums[kind] + self.likely[kind]) * 2 >= self.present and kind in self.odd:
                raise self._mixture(kind, ways or (f"data.categorical=[{self.name}]", f"data.drop=[{self.name}]"))
        return "boolean" if self.nums["boolean"] == self.present else "category"

    def needs_counts(self) -> bool:
        """Return whether it is a category whose first values were not counted, as they were numbers."""
        try:
            return self.counted < self.present and self.kind() == "category"
        except RunnerError:
            return False

    def column(self, kind: str, *, most: int) -> Column:
        ranked = sorted(self.texts.items(), key=lambda item: (-item[1], item[0]))[:most]
        texts = tuple(text for text, _ in ranked) if kind == "category" else ()
        offset = self.offset() if kind == "number" else 0.0
        return Column(self.name, kind, texts, self.has_times and kind == "date", self.present < self.rows, offset)

    def offset(self) -> float:
        """Return what to subtract so that float32 keeps its numbers apart: their mean, or 0 if nothing is needed."""
        mean, spread = float(self._moments.mean[0]), float(self._moments.deviation()[0])
        far = APART if abs(mean) >= ROUNDED else FAR_OFF
        if not (0 < spread * far < abs(mean) < float("inf")):
            return 0.0
        return float(round(mean)) if spread > 1 else mean

    def _add(self, kind: str, values: Any, num: int) -> None:
        import pyarrow as pa

        self.nums[kind] += num
        if kind == "date" and not self.has_times:
            microseconds = values.drop_null().cast(pa.int64()).to_numpy(zero_copy_only=False)
            self.has_times = bool((microseconds % DAY_MICROSECONDS).any())
        if kind == "number":
            numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            fits = np.abs(numbers) <= np.finfo(np.float32).max  # the encoder reports the others
            self._moments.update(np.where(fits, numbers, np.nan)[:, None])

    def _read_texts(self, values: Any, place: Place, num: int) -> None:
        import pyarrow as pa

        try:
            self._add("number", values.cast(pa.float64()), num)
            return
        except pa.ArrowInvalid:
            num_numbers = cells.count_matches(values, NUMBER)
            self.nums["number"] += num_numbers
            self.likely["number"] += max(0, cells.count_matches(values, LIKE_A_NUMBER) - num_numbers)
            self._add_odd("number", values, NUMBER, place)
        num_booleans = cells.count_matches(values, "^(?i:true|false)$")
        self.nums["boolean"] += num_booleans
        if num_dates := cells.count_matches(values, LIKE_A_DATE):
            try:
                self._add("date", cells.as_timestamps(values), num)
            except BadValue as bad:
                self.likely["date"] += num_dates
                self.odd.setdefault("date", [(place, bad.row, bad.value)])
        elif num_booleans < num:
            self._add_odd("date", values, LIKE_A_DATE, place)

    def _add_odd(self, kind: str, values: Any, pattern: str, place: Place) -> None:
        if len(odd := self.odd.setdefault(kind, [])) < MAX_NAMED:
            row, value, others = cells.first_unlike(values, pattern)
            odd += [(place, row, value), *((place, *other) for other in others)][: MAX_NAMED - len(odd)]

    def _count(self, values: Any) -> None:
        import pyarrow.compute as pc

        self.counted += len(values) - values.null_count
        for item in pc.value_counts(values.drop_null()).to_pylist():
            self.texts[cells.canonical(item["values"])] += item["counts"]
        if len(self.texts) > MAX_COUNTED:
            self.texts, self.is_cut = Counter(dict(self.texts.most_common(MAX_COUNTED // 2))), True

    def _mixture(self, kind: str, ways: Sequence[str]) -> RunnerError:
        odd = self.odd[kind]
        setting, value = odd[0][0].file.setting, odd[0][2]
        if forms := cells.suggested(self.texts):
            written = "decimal commas" if "decimal" in forms[0] else "dates"
            return RunnerError.suggest(setting, f"column {self.name!r} has {written}, e.g., {value!r}", forms)
        num = self.present - self.nums[kind] if kind == "number" else 0
        problem = f"{list_values(self.name, odd, num)}, and most values of the column are {kind}s"
        return RunnerError.suggest(setting, problem, [*_missing_marks(odd), *ways])


def scan(
    files: Sequence[TableFile], names: Sequence[str], *, counted: Sequence[str], complete: Sequence[str] = ()
) -> tuple[dict[str, Tally], int]:
    """Return a tally of each column, and how many rows were left out because a column of `complete` is missing there.

    A column that begins with numbers and turns out to be texts takes a second reading. counted: columns whose numbers are
    counted, too.
    """
    always = set(counted)
    while True:
        tallies = {name: Tally(name, counts=name in always) for name in names}
        num_left_out = 0
        for columns, place, left_out in tidy_batches(files, names, complete):
            num_left_out += left_out
            for name, tally in tallies.items():
                tally.update(columns[name], place)
        again = {name for name, tally in tallies.items() if name not in always and tally.needs_counts()}
        if not again:
            return tallies, num_left_out
        always |= again


def _missing_marks(odd: Sequence[tuple[Place, int, Any]]) -> list[str]:
    marks = list(dict.fromkeys(str(value) for _, _, value in odd))
    if len(marks) > 3 or any(len(mark) > 12 or re.search(r"[\d']", mark) for mark in marks):
        return []
    quoted = ",".join(f"'{mark}'" for mark in marks)
    return [f'"data.missing_values=[{quoted}]"']
