"""Rewrites the numbers and dates of a table's file in the one form that all readers here take: 3.5, 2026-11-21."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.errors import Fault, refuse

#: numbers that can't be meant otherwise: $5, $1,234.50 and 1,234.50
GROUPED = r"^[+-]?(\$\d{1,3}(,\d{3})*(\.\d+)?|\$\d+(\.\d+)?|\d{1,3}(,\d{3})+\.\d+)$"
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
    """decimal: with "," points are between thousands. header: False for files that begin with a row; their columns are
    c0, c1 and so on. date_format: as strptime's, the first that fits a text."""

    decimal: str = "."
    header: bool = True
    date_format: tuple[str, ...] = ()

    def tidied(self, values: Any) -> Any:
        """Arrow texts; what is neither a number nor a date of this form stays as it is."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for pattern in self.date_format:
            stamps = _as_dates(values, pattern)
            values = pc.coalesce(stamps.cast(pa.string()), values)
        numbers, away = (WITH_COMMA, r"\.") if self.decimal == "," else (GROUPED, "[$,]")
        fits = pc.match_substring_regex(values, numbers)
        if not pc.any(fits).as_py():
            return values
        plain = pc.replace_substring_regex(values, away, "")
        return pc.if_else(fits, pc.replace_substring(plain, ",", "."), values)

    def node(self) -> dict[str, Any]:
        """Plain values, for form_of(); {} for the usual one."""
        return {} if self == Form() else asdict(self) | {"date_format": list(self.date_format)}


def form_of(decimal: str = ".", header: bool = True, date_format: str | Sequence[str] | None = None) -> Form:
    """Raises: RunnerError for settings that are none."""
    faults = []
    if decimal not in (".", ","):
        problem = "decimals stand behind a point or a comma"
        faults.append(Fault(f"data.decimal={decimal}", problem, "data.decimal=. or \"data.decimal=','\""))
    if not isinstance(header, bool):
        problem = "the first line has the columns' names (true), or is a row (false)"
        faults.append(Fault(f"data.header={header}", problem, "data.header=true or data.header=false"))
    patterns = [date_format] if isinstance(date_format, str) else list(date_format or ())
    for pattern in patterns:
        if "%" not in str(pattern):
            problem = "a date's parts are written as strptime names them: %d %m %Y %H %M %S"
            faults.append(Fault(f"data.date_format={pattern}", problem, "data.date_format='%d.%m.%Y', say"))
    refuse(faults)
    return Form(decimal, header, tuple(patterns))


def suggested(texts: Iterable[str]) -> str:
    """The setting with which all of the texts are numbers or dates; empty where there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = list(texts)
    values = pa.array(found, pa.string())
    if not found:
        return ""
    commas = sum("," in text for text in found)
    in_thousands = pc.sum(pc.match_substring_regex(values, THOUSANDS)).as_py()
    if (
        in_thousands < commas
        and commas * 2 >= len(found)
        and pc.all(pc.match_substring_regex(values, WITH_COMMA)).as_py()
    ):
        return "\"data.decimal=','\""
    fitting = [pattern for pattern in FORMATS if not _as_dates(values, pattern).null_count]
    return " or ".join(f"data.date_format='{pattern}'" for pattern in fitting[:2])


def _as_dates(values: Any, pattern: str) -> Any:
    """Null for what does not fit; strptime takes 26 for %Y, and the years 99 and 01 would stand in the wrong order."""
    import pyarrow.compute as pc

    stamps = pc.strptime(values, format=pattern, unit="s", error_is_null=True)
    return pc.if_else(pc.less(pc.year(stamps), LEAST_YEAR), None, stamps)
