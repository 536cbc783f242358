"""Makes a DataFrame from encoded rows, as an example of a model's input: an Encoder makes the same rows of it."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from typing import Any

from runner.data.tables.encoder import Column, Columns

BEGIN = dt.datetime(1970, 1, 1)
MADE_UP = ("0", "1", "1.5", "0.5")


def frame_of(columns: Columns, rows: Any) -> Any:  # (n, num_floats) float32
    """As pandas reads a CSV: numbers, true and false, texts, dates as texts. A category that is not known has a text that is none."""
    import pandas

    found, start = {}, 0
    for column in columns.columns:
        end = start + len(column.sizes)
        values = [None if math.isnan(row[0]) else _value(column, row) for row in rows[:, start:end]]
        found[column.name] = pandas.Series(values, dtype="float64" if column.kind == "number" else "object")
        start = end
    return pandas.DataFrame(found)


def made_up(columns: Columns, count: int = 4) -> Any:
    """Some rows, where nobody has kept any."""
    import pandas

    def texts(column: Column) -> list[str]:
        if column.kind == "category":
            return list(column.categories)
        if column.kind == "date":
            return [f"2026-11-2{day} 0{day}:30:00" if column.has_times else f"2026-11-2{day}" for day in range(1, 5)]
        return ["false", "true"] if column.kind == "boolean" else list(MADE_UP)

    return pandas.DataFrame(
        {column.name: list(itertools.islice(itertools.cycle(texts(column)), count)) for column in columns.columns}
    )


def _value(column: Column, floats: Any) -> Any:
    if column.kind == "category":
        code = int(floats[0])
        return column.categories[code] if code >= 0 else _no_category(column)
    if column.kind == "boolean":
        return bool(floats[0])
    if column.kind == "date":
        return _date(float(floats[0]), float(floats[3]) if column.has_times else None)
    return float(str(floats[0])) + column.offset  # 5.1, and not 5.099999904632568: float32 has no more digits


def _date(days: float, hours: float | None) -> str:
    if hours is None:
        return str((BEGIN + dt.timedelta(round(days))).date())
    return (BEGIN + dt.timedelta(round(days - hours / 24), hours=hours)).isoformat(" ")


def _no_category(column: Column) -> str:
    taken = {text.lower() for text in column.categories}
    return next(text for count in itertools.count() if (text := f"other{'?' * count}") not in taken)
