"""Rewrite a table's numbers, dates and missing values in one form: 3.5, 2026-11-21, null."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.errors import Problem, refuse

#: unambiguous numbers: $5, €1,234.50 and 1,234.50
GROUPED = r"^[+-]?([$€£¥]\d{1,3}(,\d{3})*(\.\d+)?|[$€£¥]\d+(\.\d+)?|\d{1,3}(,\d{3})+\.\d+)$"
#: where a comma parts the decimals: 3,5 and 1.234 and 1.234,50
WITH_COMMA = r"^[+-]?(\d+(,\d+)?|,\d+|\d{1,3}(\.\d{3})+(,\d+)?)([eE][+-]?\d+)?$"
#: 1,234 and 12,345,678: thousands, or three decimals
THOUSANDS = r"^[+-]?\d{1,3}(,\d{3})+$"
LEAST_YEAR = 1000
#: that are recognised, so that they can be offered
DAYS = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%Y/%m/%d")
TIMES = ("%H:%M", "%H:%M:%S")
FORMATS = (*DAYS, "%d.%m.%y", "%m/%d/%y", "%d/%m/%y", *TIMES, *(f"{day} {time}" for day in DAYS for time in TIMES))


@dataclass(frozen=True)
class Form:
    """How values are written in a file.

    Args:
        decimal: The decimal separator; with "," points separate thousands.
        header: False if the first line is data; columns are then named c0, c1, ...
        date_format: Formats of strptime; the first that fits a text is used.
        missing_values: Texts or numbers that mark a missing value.
    """

    decimal: str = "."
    header: bool = True
    date_format: tuple[str, ...] = ()
    missing_values: tuple[str, ...] = ()

    def tidied(self, values: Any) -> Any:
        """Return Arrow values with missing values as null, and texts with numbers and dates rewritten."""
        import pyarrow as pa
        import pyarrow.compute as pc

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
            stamps = _as_dates(values, pattern)
            values = pc.coalesce(stamps.cast(pa.string()), values)
        numbers, away = (WITH_COMMA, r"\.") if self.decimal == "," else (GROUPED, "[$€£¥,]")
        fits = pc.match_substring_regex(values, numbers)
        if not pc.any(fits).as_py():
            return values
        plain = pc.replace_substring_regex(values, away, "")
        return pc.if_else(fits, pc.replace_substring(plain, ",", "."), values)

    def node(self) -> dict[str, Any]:
        """Return plain values for form_of(): the settings that are not the default."""
        default = asdict(Form())
        changed = {key: value for key, value in asdict(self).items() if value != default[key]}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()}


def form_of(
    decimal: str = ".",
    header: bool = True,
    date_format: str | Sequence[str] | None = None,
    missing_values: Any = None,
) -> Form:
    """Return the form for a user's settings.

    Raises:
        RunnerError: A setting is not valid.
    """
    problems = []
    if decimal not in (".", ","):
        problem = "`data.decimal` must be a point or a comma"
        problems.append(Problem(f"data.decimal={decimal}", problem, "use `data.decimal=.` or `\"data.decimal=','\"`"))
    if not isinstance(header, bool):
        problem = "`data.header` must be true (the first line has the column names) or false"
        problems.append(Problem.suggest(f"data.header={header}", problem, ["data.header=true", "data.header=false"]))
    patterns = [date_format] if isinstance(date_format, str) else list(date_format or ())
    for pattern in patterns:
        if "%" not in str(pattern):
            problem = "`data.date_format` must use the codes of strptime: %d %m %Y %H %M %S"
            problems.append(Problem.suggest(f"data.date_format={pattern}", problem, ["data.date_format='%d.%m.%Y'"]))
    marks = [missing_values] if isinstance(missing_values, str | int | float) else list(missing_values or ())
    if any(isinstance(mark, bool) or not isinstance(mark, str | int | float) for mark in marks):
        problem = "`data.missing_values` must be a list of texts and numbers"
        problems.append(
            Problem.suggest(f"data.missing_values={missing_values}", problem, ["\"data.missing_values=['-']\""])
        )
    refuse(problems)
    return Form(decimal, header, tuple(patterns), tuple(map(str, marks)))


def suggested(texts: Iterable[str]) -> list[str]:
    """Return the settings with which all of the texts are numbers or dates."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = list(texts)
    values = pa.array(found, pa.string())
    if not found:
        return []
    commas = sum("," in text for text in found)
    in_thousands = pc.sum(pc.match_substring_regex(values, THOUSANDS)).as_py()
    if (
        in_thousands < commas
        and commas * 2 >= len(found)
        and pc.all(pc.match_substring_regex(values, WITH_COMMA)).as_py()
    ):
        return ["\"data.decimal=','\""]
    fitting = [pattern for pattern in FORMATS if not _as_dates(values, pattern).null_count]
    return [f"data.date_format='{pattern}'" for pattern in fitting[:2]]


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _as_dates(values: Any, pattern: str) -> Any:
    import pyarrow.compute as pc

    stamps = pc.strptime(values, format=pattern, unit="s", error_is_null=True)
    return pc.if_else(pc.less(pc.year(stamps), LEAST_YEAR), None, stamps)
