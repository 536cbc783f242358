"""Points and a sqlite store's file go in; they stand in its table of metrics, ten times as fast as through log_batch.

log_batch costs 95 us a point, nearly all of it in SQLAlchemy's objects, so that a loop of 3,000 steps a second with
three metrics would make points faster than they are stored, on a core that training could use. Here the newest point of
each name goes through log_batch, which checks the run and the names and keeps the latest values, and the rest as rows.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runner.tracking.memory import Series, joined
from runner.tracking.records import Points, Record
from runner.tracking.spelling import spell

COLUMNS = ("key", "value", "timestamp", "run_uuid", "step", "is_nan")
LARGEST = np.finfo(np.float64).max  # MLflow's own stand-in for infinity
INSERT = f"INSERT OR IGNORE INTO metrics ({', '.join(COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?)"


def can_insert(path: Path | None) -> bool:
    """Whether the store is a sqlite file whose metrics have just the columns known here, all of them in the key."""
    if path is None or not path.is_file():
        return False
    with contextlib.closing(sqlite3.connect(path)) as database:
        columns = {row[1]: row[5] for row in database.execute("PRAGMA table_info(metrics)")}
    return set(columns) == set(COLUMNS) and all(columns.values())


def by_key(records: Iterable[Record]) -> dict[str, Series]:
    """The points in `records` by the name that MLflow takes, in the order of writing."""
    parts: dict[str, list[Series]] = {}
    for record in records:
        if isinstance(record.data, Points):
            rows = record.data
            for column, name in enumerate(rows.names):
                parts.setdefault(spell(name), []).append((rows.steps, rows.times_ms, rows.values[:, column]))
    return {key: joined(pieces) for key, pieces in parts.items()}


def newest(series: Mapping[str, Series]) -> list[Any]:
    """MLflow's entity of the last point of each name: of the highest step, and the latest of those."""
    from mlflow.entities import Metric

    found = []
    for key, (steps, times_ms, values) in series.items():
        last = np.lexsort((times_ms, steps))[-1]
        found.append(Metric(key, float(values[last]), int(times_ms[last]), int(steps[last])))
    return found


def insert(path: Path, run_id: str, series: Mapping[str, Series]) -> None:
    """Writes the points as MLflow would; those that are there stay as they are. About 10 us a point.

    Raises: sqlite3.Error; then none is written.
    """
    with contextlib.closing(sqlite3.connect(path, timeout=20.0)) as database, database:
        database.execute("PRAGMA foreign_keys = ON")
        for key, (steps, times_ms, values) in series.items():
            is_nan = np.isnan(values)
            stored = np.clip(np.where(is_nan, 0.0, values), -LARGEST, LARGEST)
            columns = zip(stored.tolist(), times_ms.tolist(), steps.tolist(), is_nan.astype(int).tolist(), strict=True)
            database.executemany(INSERT, ((key, value, time, run_id, step, nan) for value, time, step, nan in columns))
