"""Read a run's points and events from its journal, for curves, reports and comparisons; write its points as Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.tracking.journal_records import FILE, Points, Record, scan

HISTORY = "history.parquet"  # in a run directory, and among its artifacts, if the store has a part of the points
PIECE = 1_000_000  # points

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


def pieces(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a journal's points as columns `metric`, `step`, `time_ms`, `value`, about a million at a time.

    A row is a point, in the order of writing, grouped by name. `metric` has indices into `names`.
    """
    waiting: list[Points] = []
    num_points = 0
    if not (folder / FILE).is_file():
        return
    for record in scan(folder / FILE):
        if isinstance(rows := record.data, Points):
            waiting.append(rows)
            num_points += record.num_points
        if num_points >= PIECE:
            yield _columns(waiting)
            waiting, num_points = [], 0
    if waiting:
        yield _columns(waiting)


def write_history(folder: Path) -> Path:
    """Write the file atomically; ten million points take some seconds. Imports pyarrow (0.2 s)."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    kinds = {"metric": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "step": pyarrow.int64()}
    schema = pyarrow.schema({**kinds, "time_ms": pyarrow.int64(), "value": pyarrow.float64()})
    file = folder / HISTORY
    partial = file.with_name(f".{HISTORY}.writing")
    try:
        with ParquetWriter(partial, schema, compression="zstd") as writer:
            for columns in pieces(folder):
                metric = pyarrow.DictionaryArray.from_arrays(columns["metric"], columns.pop("names"))
                writer.write_table(pyarrow.table({**columns, "metric": metric}, schema=schema))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


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


def _columns(blocks: Sequence[Points]) -> dict[str, Any]:
    series = series_of(blocks)
    sizes = [len(steps) for steps, _, _ in series.values()]
    keys = ("step", "time_ms", "value")
    return {
        "names": list(series),
        "metric": np.repeat(np.arange(len(series), dtype=np.int32), sizes),
        **{key: np.concatenate([one[place] for one in series.values()]) for place, key in enumerate(keys)},
    }
