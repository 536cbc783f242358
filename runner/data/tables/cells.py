"""Converts the columns of a table, as Arrow values, into NumPy arrays: numbers, dates, and codes of texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from runner.config.checks import Check

#: texts that mark a missing value
MISSING = ("", "NA", "N/A", "n/a", "NaN", "nan", "NaT", "null", "NULL", "None", "<NA>", "#N/A", "?")
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?([iI]nf|[iI]nfinity)$"
#: probably meant as a number: 3,5 and 1'000 and 1.234,50
LIKE_A_NUMBER = r"^[+-]?[\d.,']*\d[\d.,' ]*([eE][+-]?\d+)?$"
LIKE_A_DATE = r"^\d{4}-\d{2}-\d{2}([T ].*)?$"
#: unambiguous numbers: $5, €1,234.50 and 1,234.50
GROUPED = r"^[+-]?([$€£¥]\d{1,3}(,\d{3})*(\.\d+)?|[$€£¥]\d+(\.\d+)?|\d{1,3}(,\d{3})+\.\d+)$"
#: with a decimal comma: 3,5 and 1.234 and 1.234,50
WITH_COMMA = r"^[+-]?(\d+(,\d+)?|,\d+|\d{1,3}(\.\d{3})+(,\d+)?)([eE][+-]?\d+)?$"
#: 1,234 and 12,345,678: thousands, or three decimals
THOUSANDS = r"^[+-]?\d{1,3}(,\d{3})+$"
MIN_YEAR = 1000
#: formats that suggested() tries
DAYS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%Y/%m/%d")
TIMES = ("%H:%M", "%H:%M:%S")
FORMATS = (*DAYS, "%d.%m.%y", "%m/%d/%y", "%d/%m/%y", *TIMES, *(f"{day} {time}" for day in DAYS for time in TIMES))
DAY_MICROSECONDS = 86_400_000_000
#: bad values of a column that an error lists
MAX_NAMED = 10


class BadValue(Exception):
    """A value that its column can't hold; others: further rows and values of the same batch."""

    def __init__(self, row: int, value: Any, others: Sequence[tuple[int, Any]] = ()) -> None:
        super().__init__(row, value)
        self.row, self.value, self.others = row, value, others


class UnknownType(Exception):
    """A column of lists, bytes or the like."""


@dataclass(frozen=True)
class Form:
    """How values are written in a file."""

    decimal: str = "."  # with "," points separate thousands
    header: bool = True  # False if the first line is data; columns are then named c0, c1, ...
    date_format: tuple[str, ...] = ()  # of strptime; the first that fits a text is used
    missing_values: tuple[str, ...] = ()  # texts or numbers that mark a missing value

    def tidied(self, values: Any) -> Any:
        """Return texts, numbers, booleans or timestamps: missing values are null, numbers and dates in one form."""
        import pyarrow as pa
        import pyarrow.compute as pc

        values = _tidy(values)
        is_text = pa.types.is_string(values.type)
        if self.missing_values and (is_text or pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
            numbers_only = [float(mark) for mark in self.missing_values if _is_number(mark)]
            marks = [*self.missing_values, *map(str, numbers_only)] if is_text else numbers_only  # -999 and -999.0
            compared = values if is_text else values.cast(pa.float64(), safe=False)
            is_missing = pc.is_in(compared, value_set=pa.array(marks, compared.type))
            values = pc.if_else(is_missing, pa.scalar(None, values.type), values)
        if not is_text:
            return values
        for pattern in self.date_format:
            values = pc.coalesce(_dates(values, pattern).cast(pa.string()), values)
        numbers, extra = (WITH_COMMA, r"\.") if self.decimal == "," else (GROUPED, "[$€£¥,]")
        fits = pc.match_substring_regex(values, numbers)
        if not pc.any(fits).as_py():
            return values
        plain = pc.replace_substring_regex(values, extra, "")
        return pc.if_else(fits, pc.replace_substring(plain, ",", "."), values)

    def node(self) -> dict[str, Any]:
        """Return the settings that are not the default, for form_of()."""
        default = asdict(Form())
        changed = {key: value for key, value in asdict(self).items() if value != default[key]}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()}


def form_of(
    decimal: str = ".", header: bool = True, date_format: str | Sequence[str] | None = None, missing_values: Any = None
) -> Form:
    """Return the form for a user's settings."""
    return Form(decimal, header, _listed(date_format), _listed(missing_values))


def _listed(values: Any) -> tuple[str, ...]:
    return tuple(map(str, [values] if isinstance(values, str | int | float) else values or ()))


def _are_formats(values: Any) -> bool:
    return isinstance(values, str | Sequence) and all("%" in each for each in _listed(values))


def _are_marks(values: Any) -> bool:
    marks = values if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    return not any(isinstance(mark, bool) or not isinstance(mark, str | int | float) for mark in marks)


Decimal = Annotated[str, Check(lambda value: value in (".", ","), "a point or a comma", "", lambda value: (".", "','"))]
Header = Annotated[
    bool,
    Check(
        lambda value: isinstance(value, bool),
        "true (the first line has the column names) or false",
        "",
        lambda value: ("true", "false"),
    ),
]
DateFormat = Annotated[
    str | Sequence[str], Check(_are_formats, "in the codes of strptime: %d %m %Y %H %M %S", "'%d.%m.%Y'")
]
MissingValues = Annotated[Any, Check(_are_marks, "a list of texts and numbers", "['-']")]


def suggested(texts: Iterable[str]) -> list[str]:
    """Return the settings with which all of the texts are numbers or dates."""
    import pyarrow as pa

    values = pa.array(list(texts), pa.string())
    if not len(values):
        return []
    num_commas = count_matches(values, ",")
    has_decimals = count_matches(values, THOUSANDS) < num_commas and num_commas * 2 >= len(values)
    if has_decimals and count_matches(values, WITH_COMMA) == len(values):
        return ["\"data.decimal=','\""]
    fitting = [pattern for pattern in FORMATS if not _dates(values, pattern).null_count]
    return [f"data.date_format='{pattern}'" for pattern in fitting[:2]]


def type_of(values: Any) -> str:
    """Return text, number, boolean or date, for values that a form has tidied."""
    import pyarrow as pa

    if pa.types.is_string(values.type):
        return "text"
    if pa.types.is_timestamp(values.type):
        return "date"
    return "boolean" if pa.types.is_boolean(values.type) else "number"


def as_numbers(values: Any) -> Any:
    """Return (N,) float64, NaN where a value is missing. Raises: BadValue for anything but a finite number."""
    import pyarrow as pa

    try:
        numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise BadValue(*first_unlike(values, NUMBER)) from None
    except pa.ArrowNotImplementedError:  # a date
        raise BadValue(0, values[0].as_py()) from None
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite
        _check(~np.isinf(numbers.astype(np.float32)), values)
    return numbers


def as_booleans(values: Any) -> Any:
    """Return (N,) float64: 1, 0, or NaN where a value is missing. Raises: BadValue."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if type_of(values) == "text":
        codes = pc.index_in(pc.utf8_lower(values), value_set=pa.array(["false", "true", "0", "1"]))
        _check(pc.or_(pc.is_valid(codes), pc.is_null(values)).to_numpy(zero_copy_only=False), values)
        return codes.cast(pa.float64()).to_numpy(zero_copy_only=False) % 2
    numbers = as_numbers(values)
    _check(np.isnan(numbers) | np.isin(numbers, (0, 1)), values)
    return numbers


def as_timestamps(values: Any) -> Any:
    """Return timestamps in microseconds, in UTC if they have a zone. Raises: BadValue for anything but an ISO date."""
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
    for row in range(len(values) if len(values) > 1 else 0):
        try:
            as_timestamps(values.slice(row, 1))
        except BadValue:
            raise BadValue(row, values[row].as_py()) from None
    raise BadValue(0, values[0].as_py())  # some values have a zone and others have not


def as_dates(values: Any, *, has_times: bool) -> Any:
    """Return (N, 3 or 4) float64: days since 1970, month 0..11, weekday 0..6 from Monday, and hours 0..24."""
    import pyarrow as pa
    import pyarrow.compute as pc

    stamps = as_timestamps(values)
    microseconds = stamps.cast(pa.int64()).cast(pa.float64()).to_numpy(zero_copy_only=False)
    month, weekday = (
        part(stamps).cast(pa.float64()).to_numpy(zero_copy_only=False) for part in (pc.month, pc.day_of_week)
    )
    hours = [microseconds % DAY_MICROSECONDS / DAY_MICROSECONDS * 24] if has_times else []
    return np.stack([microseconds / DAY_MICROSECONDS, month - 1, weekday, *hours], 1)


def as_codes(values: Any, codes: Mapping[str, int]) -> Any:
    """Return (N,) float64: the code of each text, -1 for an unknown one, NaN where it is missing."""
    coded = values.dictionary_encode()
    known = [codes.get(canonical(text), -1) for text in coded.dictionary.to_pylist()]
    indices = coded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
    return np.array([*known, np.nan], dtype=np.float64)[indices]


def canonical(value: Any) -> str:
    """Return a category's text: the same for 3, 3.0 and "3.0" (integers with gaps become floats), and for True and TRUE."""
    text = str(value)
    if text.lower() in ("true", "false"):
        return text.lower()
    return text.split(".")[0] if re.fullmatch(r"[+-]?\d+\.0+", text) else text


def first_unlike(values: Any, pattern: str) -> tuple[int, Any, list[tuple[int, Any]]]:
    """Return row and value of the first text that the pattern does not match, and up to nine more of them."""
    import pyarrow.compute as pc

    fits = pc.match_substring_regex(values, pattern).fill_null(True).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(~fits)[:MAX_NAMED].tolist() or [0]
    (row, value), *others = [(row, values[row].as_py()) for row in rows]
    return row, value, others


def count_matches(values: Any, pattern: str) -> int:
    import pyarrow.compute as pc

    return pc.sum(pc.match_substring_regex(values, pattern)).as_py() or 0


def _tidy(values: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.dictionary_decode(), kind.value_type
    if pa.types.is_null(kind) or str(kind) in ("string", "large_string", "string_view"):
        texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
        return pc.if_else(pc.is_in(texts, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), texts)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        zone = "UTC" if pa.types.is_timestamp(kind) and kind.tz else None
        return values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64()).cast(pa.timestamp("us"))
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return values
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = values.cast(pa.float64())
        return pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)
    raise UnknownType(str(kind))


def _check(fits: Any, values: Any) -> None:
    if not fits.all():
        raise BadValue(row := int((~fits).argmax()), values[row].as_py())


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _dates(values: Any, pattern: str) -> Any:
    import pyarrow.compute as pc

    stamps = pc.strptime(values, format=pattern, unit="s", error_is_null=True)
    return pc.if_else(pc.less(pc.year(stamps), MIN_YEAR), None, stamps)
