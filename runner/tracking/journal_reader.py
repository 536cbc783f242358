"""Read a run's points and events from its journal, for curves, reports, comparisons and tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.tracking.journal_records import FILE, Points, Record, scan

Series = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def read_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all points as {name: [(step, value), ...]}, in the order of writing; a million take about a second."""
    return {
        name: list(zip(steps.tolist(), values.tolist(), strict=True))
        for name, (steps, _, values) in read_series(folder).items()
    }


def read_series(folder: Path) -> dict[str, Series]:
    """Return all points as {name: (steps (n,), times_ms (n,), values (n,))}, in the order of writing."""
    return series_of([record.data for record in _records(folder) if isinstance(record.data, Points)])


def series_of(blocks: Sequence[Points]) -> dict[str, Series]:
    """Return the points of some blocks by name, in order. Blocks with the same names are joined first, which is faster."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, block in enumerate(blocks):
        alike.setdefault(block.names, []).append(number)
    parts: dict[str, list[tuple[NDArray[np.int64], Series]]] = {}
    for names, numbers in alike.items():
        steps = np.concatenate([blocks[number].steps for number in numbers])
        times_ms = np.concatenate([blocks[number].times_ms for number in numbers])
        values = np.concatenate([blocks[number].values for number in numbers])
        order = np.repeat(numbers, [len(blocks[number].steps) for number in numbers])
        for column, name in enumerate(names):
            parts.setdefault(name, []).append((order, (steps, times_ms, values[:, column])))
    return {name: _in_order(found) for name, found in parts.items()}


def read_measured(folder: Path, step: int) -> dict[str, tuple[float, int, int]]:
    """Return the evaluation of the weights of `step` as {name: (value, step, time_ms)}: val/... at it, and the last test/...

    Reads the complete journal, 0.1 s per million points.
    """
    found: dict[str, tuple[float, int, int]] = {}
    path = folder / FILE
    for record in scan(path) if path.is_file() else ():
        if not isinstance(rows := record.data, Points):
            continue
        for column, name in enumerate(rows.names):
            is_there = rows.steps == step if name.startswith("val/") else rows.steps >= step
            if name.startswith(("val/", "test/")) and is_there.any():
                row = int(np.flatnonzero(is_there)[-1])
                found[name] = (float(rows.values[row, column]), int(rows.steps[row]), int(rows.times_ms[row]))
    return found


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all events as their fields and `kind`, in the order of writing."""
    return [{"kind": record.kind, **record.data} for record in _records(folder) if isinstance(record.data, dict)]


def _in_order(parts: Sequence[tuple[NDArray[np.int64], Series]]) -> Series:
    if len(parts) == 1:
        steps, times_ms, values = parts[0][1]
        return steps, times_ms, values.copy()  # a copy of the column, so that the table is freed
    place = np.concatenate([order for order, _ in parts]).argsort(kind="stable")
    steps, times_ms, values = (
        np.concatenate(columns)[place] for columns in zip(*(part for _, part in parts), strict=True)
    )
    return steps, times_ms, values


def _records(folder: Path) -> list[Record]:
    path = folder / FILE
    return list(scan(path)) if path.is_file() else []
