"""A run's points and events, read from its journal on disk: for curves, reports, comparisons and tests. It keeps nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.tracking.journal_records import FILE, Points, Record, scan

Series = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def read_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every point as {name: [(step, value), ...]}, in the order of writing; a million take about a second."""
    return {
        name: list(zip(steps.tolist(), values.tolist(), strict=True))
        for name, (steps, _, values) in read_series(folder).items()
    }


def read_series(folder: Path) -> dict[str, Series]:
    """Every point as {name: (steps (n,), times_ms (n,), values (n,))}, in the order of writing."""
    parts: dict[str, list[Series]] = {}
    for record in _records(folder):
        if isinstance(record.data, Points):
            rows = record.data
            for column, name in enumerate(rows.names):
                parts.setdefault(name, []).append((rows.steps, rows.times_ms, rows.values[:, column]))
    return {name: _joined(pieces) for name, pieces in parts.items()}


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Every event as its fields and its `kind`, in the order of writing."""
    return [{"kind": record.kind, **record.data} for record in _records(folder) if isinstance(record.data, dict)]


def _joined(pieces: list[Series]) -> Series:
    """Series of one name, one after the other."""
    steps, times_ms, values = zip(*pieces, strict=True)
    return np.concatenate(steps), np.concatenate(times_ms), np.concatenate(values)


def _records(folder: Path) -> list[Record]:
    path = folder / FILE
    return list(scan(path)) if path.is_file() else []
