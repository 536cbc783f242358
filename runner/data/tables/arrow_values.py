"""Converts columns of Arrow values into NumPy arrays: numbers, dates as numbers, and the codes of texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: texts that say that a value is missing
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NaT", "null", "NULL", "None", "<NA>", "#N/A", "?")
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?([iI]nf|[iI]nfinity)$"
#: what is meant as a number, and may not be one: 3,5 and 1'000 and 1.234,50
LIKE_A_NUMBER = r"^[+-]?[\d.,']*\d[\d.,' ]*([eE][+-]?\d+)?$"
LIKE_A_DATE = r"^\d{4}-\d{2}-\d{2}([T ].*)?$"
#: microseconds of a day
DAY = 86_400_000_000


#: bad values of a column that an error lists
MOST_NAMED = 10


class BadValue(Exception):
    """A value that its column can't hold; others: further rows and values of the same batch."""

    def __init__(self, row: int, value: Any, others: Sequence[tuple[int, Any]] = ()) -> None:
        super().__init__(row, value)
        self.row, self.value, self.others = row, value, others


class UnknownType(Exception):
    """A column of lists, bytes or the like."""


def tidy(values: Any) -> Any:
    """The column as texts, numbers, booleans or timestamps; missing values are null. Raises: UnknownType."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.dictionary_decode(), kind.value_type
    if (
        pa.types.is_null(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or str(kind) == "string_view"
    ):
        texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
        return pc.if_else(pc.is_in(texts, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), texts)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        zone = kind.tz if pa.types.is_timestamp(kind) else None
        return (
            values.cast(pa.timestamp("us", "UTC" if zone else None), safe=False)
            .cast(pa.int64())
            .cast(pa.timestamp("us"))
        )
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return values
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = values.cast(pa.float64())
        return pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)
    raise UnknownType(str(kind))


def type_of(values: Any) -> str:
    """text, number, boolean or date, of what tidy() returns."""
    import pyarrow as pa

    if pa.types.is_string(values.type):
        return "text"
    if pa.types.is_timestamp(values.type):
        return "date"
    return "boolean" if pa.types.is_boolean(values.type) else "number"


def as_numbers(values: Any) -> Any:
    """(N,) float64, NaN where it is missing. Raises: BadValue for what is no finite number."""
    import pyarrow as pa

    try:
        numbers = values.cast(pa.float64(), safe=False)
    except pa.ArrowInvalid:
        raise BadValue(*first_not(values, NUMBER)) from None
    except pa.ArrowNotImplementedError:  # a date
        raise BadValue(0, values[0].as_py()) from None
    found = numbers.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, and is told
        infinite = np.isinf(found.astype(np.float32))
    if infinite.any():
        row = int(infinite.argmax())
        raise BadValue(row, values[row].as_py())
    return found


def as_booleans(values: Any) -> Any:
    """(N,) float64: 1, 0, or NaN where it is missing. Raises: BadValue."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if type_of(values) == "text":
        lower = pc.utf8_lower(values)
        codes = pc.index_in(lower, value_set=pa.array(["false", "true", "0", "1"]))
        wrong = pc.and_(pc.is_null(codes), pc.is_valid(values)).to_numpy(zero_copy_only=False)
        if wrong.any():
            row = int(wrong.argmax())
            raise BadValue(row, values[row].as_py())
        return codes.cast(pa.float64()).to_numpy(zero_copy_only=False) % 2
    found = as_numbers(values)
    if (wrong := ~(np.isnan(found) | np.isin(found, (0, 1)))).any():
        raise BadValue(row := int(wrong.argmax()), values[row].as_py())
    return found


def as_timestamps(values: Any) -> Any:
    """Timestamps in microseconds, of universal time where a zone is told. Raises: BadValue for what is no ISO date."""
    import pyarrow as pa

    if type_of(values) == "date":
        return values
    if type_of(values) != "text":
        raise BadValue(0, values[0].as_py())
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            return values.cast(kind).cast(pa.int64()).cast(pa.timestamp("us"))
        except pa.ArrowInvalid:
            continue
    for row in range(len(values)):
        try:
            as_timestamps(values.slice(row, 1)) if len(values) > 1 else None
        except BadValue:
            raise BadValue(row, values[row].as_py()) from None
    raise BadValue(0, values[0].as_py())  # one is in a zone and another is in none


def as_dates(values: Any, *, has_times: bool) -> Any:
    """(N, 3 or 4) float64: days since 1970 with their fraction, month 0..11, weekday 0..6 from Monday on, hours 0..24."""
    import pyarrow as pa
    import pyarrow.compute as pc

    stamps = as_timestamps(values)
    micros = stamps.cast(pa.int64()).cast(pa.float64()).to_numpy(zero_copy_only=False)
    parts = [micros / DAY]
    parts.append(pc.month(stamps).cast(pa.float64()).to_numpy(zero_copy_only=False) - 1)
    parts.append(pc.day_of_week(stamps).cast(pa.float64()).to_numpy(zero_copy_only=False))
    if has_times:
        parts.append(micros % DAY / DAY * 24)
    return np.stack(parts, 1)


def as_codes(values: Any, numbers: Mapping[str, int]) -> Any:
    """(N,) float64: the number of each text, -1 for one that has none, NaN where it is missing."""
    coded = values.dictionary_encode()
    known = [numbers.get(canonical(text), -1) for text in coded.dictionary.to_pylist()]
    places = coded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
    return np.array([*known, np.nan], dtype=np.float64)[places]


def canonical(value: Any) -> str:
    """A category's text: the same for 3, 3.0 and "3.0", as integers with a gap come back as floats, and for True and TRUE."""
    text = str(value)
    if text.lower() in ("true", "false"):
        return text.lower()
    return text.split(".")[0] if re.fullmatch(r"[+-]?\d+\.0+", text) else text


def is_too_large(value: Any) -> bool:
    """Whether it is a finite number that float32 can't hold."""
    try:
        return bool(float(np.finfo(np.float32).max) < abs(float(value)) < float("inf"))
    except (TypeError, ValueError):
        return False


def first_not(values: Any, pattern: str) -> tuple[int, Any, list[tuple[int, Any]]]:
    """Return row and value of the first text that the pattern does not match, and up to nine more of them."""
    import pyarrow.compute as pc

    fits = pc.match_substring_regex(values, pattern).fill_null(True).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(~fits)[:MOST_NAMED].tolist() or [0]
    (row, value), *others = [(row, values[row].as_py()) for row in rows]
    return row, value, others
