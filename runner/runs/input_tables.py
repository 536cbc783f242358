"""The path of a table goes in (csv, tsv, parquet, feather); its rows come out in chunks: as numbers, or as they are."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runner.errors import Fault, RunnerError, first_line

SEPARATORS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (*SEPARATORS, ".parquet", ".feather")
ROWS_A_CHUNK = 65_536


def frames(file: Path, *, as_text: bool = False) -> Iterator[Any]:
    """The file's rows as pandas frames, up to 65,536 rows each. as_text: cells of text files as they are written.

    Raises: RunnerError for a file that can't be read as what it ends in, or has no rows.
    """
    num_rows = 0
    try:
        for frame in _frames(file, as_text=as_text):
            if len(frame):
                num_rows += len(frame)
                yield frame
    except (RunnerError, GeneratorExit):
        raise
    except Exception as error:  # pandas' and pyarrow's own
        message = first_line(error)
        problem = f"it can't be read as {file.suffix}: {message}"
        raise RunnerError(Fault(f"--input {file}", problem, "a whole file, its rows of the same length")) from error
    if not num_rows:
        raise RunnerError(Fault(f"--input {file}", "it has no rows", "a file with rows in it"))


def numbers(file: Path, *, width: int | None) -> Iterator[Any]:
    """(n, columns) float32 for each chunk. width: how many columns there must be; None for any.

    Raises: RunnerError for another number of columns, and for cells that are no finite number, with row and column.
    """
    done = 0
    for frame in frames(file):
        if width is not None and frame.shape[1] != width:
            problem = f"it has {frame.shape[1]} columns ({_listed(frame.columns)}), and the run's model takes {width}"
            raise RunnerError(
                Fault(f"--input {file}", problem, f"a table of {width} columns of numbers, none beside them")
            )
        yield _floats(frame, file, done)
        done += len(frame)


def _floats(frame: Any, file: Path, done: int) -> Any:
    import pandas

    columns = []
    for number, name in enumerate(frame.columns):
        column = frame.iloc[:, number]
        with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, and is told
            values = pandas.to_numeric(column, errors="coerce").to_numpy(np.float32, na_value=np.nan)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            cell = column.iloc[row]
            held = "no value" if pandas.isna(cell) else repr(cell)
            problem = f"row {done + row + 1}, column {name}: {held}, and the run's model takes numbers"
            raise RunnerError(Fault(f"--input {file}", problem, "the same file with those rows mended or left out"))
        columns.append(values)
    return np.stack(columns, 1)


def _frames(file: Path, *, as_text: bool) -> Iterator[Any]:
    import pandas  # 0.5 s; it comes with MLflow

    if file.suffix in SEPARATORS:
        settings: dict[str, Any] = {"dtype": str, "keep_default_na": False} if as_text else {}
        separator = SEPARATORS[file.suffix]
        try:
            with pandas.read_csv(
                file,
                sep=separator,
                chunksize=ROWS_A_CHUNK,
                encoding="utf-8-sig",
                header=0 if _has_header(file, separator) else None,
                index_col=False,
                **settings,
            ) as chunks:
                yield from chunks
        except pandas.errors.EmptyDataError:
            return
    elif file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(file) as found:
            for batch in found.iter_batches(batch_size=ROWS_A_CHUNK):
                yield batch.to_pandas()
    else:
        import pyarrow

        with pyarrow.memory_map(str(file)) as memory:
            found = pyarrow.ipc.open_file(memory)
            for number in range(found.num_record_batches):
                yield found.get_batch(number).to_pandas()


def _has_header(file: Path, separator: str) -> bool:
    """Whether the first line holds names: some cell that is no number."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        first = next(csv.reader(lines, delimiter=separator), [])
    return not first or not all(_is_number(cell) for cell in first)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _listed(names: Any) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
