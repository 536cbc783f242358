"""All points of a run in one Parquet file, for a store that has only a part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.tracking.journal_reader import series_of
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import Points, scan

FILE = "history.parquet"  # in a run directory, and among its artifacts
PIECE = 1_000_000  # points


def pieces(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a journal's points as columns `metric`, `step`, `time_ms`, `value`, about a million at a time.

    A row is a point, in the order of writing, grouped by name. `metric` has indices into `names`.
    """
    waiting: list[Points] = []
    num_points = 0
    if not (folder / JOURNAL).is_file():
        return
    for record in scan(folder / JOURNAL):
        if isinstance(rows := record.data, Points):
            waiting.append(rows)
            num_points += record.num_points
        if num_points >= PIECE:
            yield _columns(waiting)
            waiting, num_points = [], 0
    if waiting:
        yield _columns(waiting)


def write(folder: Path) -> Path:
    """Write the file atomically; ten million points take some seconds. Imports pyarrow (0.2 s)."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    kinds = {"metric": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), "step": pyarrow.int64()}
    schema = pyarrow.schema({**kinds, "time_ms": pyarrow.int64(), "value": pyarrow.float64()})
    file = folder / FILE
    partial = file.with_name(f".{FILE}.writing")
    try:
        with ParquetWriter(partial, schema, compression="zstd") as writer:
            for columns in pieces(folder):
                metric = pyarrow.DictionaryArray.from_arrays(columns["metric"], columns.pop("names"))
                writer.write_table(pyarrow.table({**columns, "metric": metric}, schema=schema))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _columns(blocks: Sequence[Points]) -> dict[str, Any]:
    series = series_of(blocks)
    sizes = [len(steps) for steps, _, _ in series.values()]
    keys = ("step", "time_ms", "value")
    return {
        "names": list(series),
        "metric": np.repeat(np.arange(len(series), dtype=np.int32), sizes),
        **{key: np.concatenate([one[place] for one in series.values()]) for place, key in enumerate(keys)},
    }
