"""Reads a pandas DataFrame as Arrow batches of its columns, like a table's file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.data.tables.files import BATCH_ROWS
from runner.data.tables.forms import Form


@dataclass(frozen=True)
class TableFrame:
    """A DataFrame, with what an Encoder asks of a TableFile. Its rows are counted from 0."""

    frame: Any
    asked: str  # how messages say what was asked for: predict(DataFrame)
    form: Form = Form()
    name: str = "the DataFrame"

    def names(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def batches(self, wanted: Sequence[str]) -> Iterator[Any]:
        """pyarrow record batches of the columns `wanted`, in that order."""
        import pyarrow as pa

        for start in range(0, len(self.frame), BATCH_ROWS):
            part = self.frame.iloc[start : start + BATCH_ROWS]
            yield pa.RecordBatch.from_arrays([_arrow(part[name]) for name in wanted], names=list(wanted))

    def place(self, row: int) -> str:
        return f"{self.name}, row {row + 1}"


def _arrow(values: Any) -> Any:
    import pandas
    import pyarrow as pa

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pyarrow 25 reads dates with zones in a way that pandas 3.1 gives up
            found = pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if pandas.isna(value) is True else str(value) for value in values], pa.string())
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
