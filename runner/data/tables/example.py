"""Makes a DataFrame from encoded rows, as an example of a model's input: an Encoder makes the same rows of it."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from typing import Any

from runner.data.tables.columns import Column, Columns

EPOCH = dt.datetime(1970, 1, 1)
NUMBERS = ("0", "1", "1.5", "0.5")


def frame_of(columns: Columns, rows: Any) -> Any:  # (n, num_floats) float32
    """Return a DataFrame as pandas reads a CSV file: numbers, booleans and texts; dates and unknown categories are texts."""
    import pandas

    series, start = {}, 0
    for column in columns.columns:
        end = start + len(column.sizes)
        values = [None if math.isnan(row[0]) else _value(column, row) for row in rows[:, start:end]]
        series[column.name] = pandas.Series(values, dtype="float64" if column.kind == "number" else "object")
        start = end
    return pandas.DataFrame(series)


def made_up(columns: Columns, count: int = 4) -> Any:
    """Return a DataFrame of rows that fit the columns, for a run without an example."""
    import pandas

    texts = {column.name: itertools.islice(itertools.cycle(_texts(column)), count) for column in columns.columns}
    return pandas.DataFrame({name: list(values) for name, values in texts.items()})


def _texts(column: Column) -> list[str]:
    if column.kind == "category":
        return list(column.categories)
    if column.kind == "date":
        return [f"2026-11-2{day} 0{day}:30:00" if column.has_times else f"2026-11-2{day}" for day in range(1, 5)]
    return ["false", "true"] if column.kind == "boolean" else list(NUMBERS)


def _value(column: Column, floats: Any) -> Any:
    if column.kind == "category":
        code = int(floats[0])
        return column.categories[code] if code >= 0 else _unknown_category(column)
    if column.kind == "boolean":
        return bool(floats[0])
    if column.kind == "number":
        return float(str(floats[0])) + column.offset  # 5.1 and not 5.099999904632568
    if not column.has_times:
        return str((EPOCH + dt.timedelta(round(float(floats[0])))).date())
    days, hours = float(floats[0]), float(floats[3])
    return (EPOCH + dt.timedelta(round(days - hours / 24), hours=hours)).isoformat(" ")


def _unknown_category(column: Column) -> str:
    known = {text.lower() for text in column.categories}
    return next(text for count in itertools.count() if (text := f"other{'?' * count}") not in known)
