"""Write columns, a chunk at a time, as a file in the format of its ending, complete or not at all. For `predict` and `history`.

A column is a NumPy array, or an Arrow ChunkedArray, whose type and missing values stay if the format has them.
"""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from runner.errors import RunnerError, nearest

Columns = Mapping[str, Any]


def texts(values: Any) -> list[Any]:
    """Return what csv.writer writes; None (empty) for a missing value, and float32 in its shortest exact form."""
    if isinstance(values, np.ndarray):
        return [str(value) for value in values] if values.dtype == np.float32 else values.tolist()
    if str(values.type) == "float":
        return [None if value is None else str(np.float32(value)) for value in plain(values)]
    return [json.dumps(value, default=str) if isinstance(value, list | dict) else value for value in plain(values)]


def plain(values: Any) -> list[Any]:
    """Return Python values, None for a missing one."""
    return values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()  # type: ignore[no-any-return]


def joined(parts: Sequence[Any]) -> Any:
    """Return the parts of a column as one array that np.load reads without pickle.

    A missing number or date becomes NaN or NaT. Types that NumPy lacks become strings, and so do integers with missing
    values if float64 can't hold them exactly.
    """
    if isinstance(parts[0], np.ndarray):
        whole = np.concatenate(parts)
        return whole.astype(str) if whole.dtype == object else whole
    import pyarrow as pa

    column = pa.chunked_array([chunk for part in parts for chunk in part.chunks])
    if pa.types.is_integer(column.type) and column.null_count:
        known = column.drop_null()
        if known.cast(pa.float64(), safe=False).cast(known.type, safe=False).equals(known):
            column = column.cast(pa.float64(), safe=False)
    is_date = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    if not column.null_count or pa.types.is_floating(column.type) or is_date:
        whole = column.to_numpy()
        if whole.dtype != object:
            return whole
    return np.array(["" if value is None else str(value) for value in texts(column)])


def check_output(path: str, *, inputs: Path) -> Path:
    """Return the file to write. Raises: RunnerError for an unknown ending, the input file, or a path that can't be written."""
    file = Path(path).expanduser()
    if file.suffix not in WRITERS:
        hits = nearest(file.suffix, WRITERS) or list(WRITERS)
        problem = f"the format `{file.suffix or 'without an ending'}` can't be written; there are {', '.join(WRITERS)}"
        ways = [f"--output {file.with_suffix(hit)}" for hit in hits]
        raise RunnerError.suggest(f"--output {path}", problem, ways)
    if file.exists() and inputs.exists() and file.samefile(inputs):
        raise RunnerError.of(f"--output {path}", "the output would overwrite the input", "use another file")
    if file.is_dir() or (inputs.is_dir() and file.resolve().is_relative_to(inputs.resolve())):
        problem = f"`{file}` is a directory" if file.is_dir() else f"`{file}` is in `{inputs}`, which is read"
        raise RunnerError.suggest(f"--output {path}", problem, [f"--output predictions{file.suffix or '.csv'}"])
    if not file.parent.is_dir():
        problem = f"there is no directory `{file.parent}`"
        raise RunnerError.of(f"--output {path}", problem, f"run `mkdir -p {file.parent}`", code="missing-file")
    try:
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        problem = f"can't write in `{file.parent}`: {error.strerror}"
        write = f"use `--output {file.name}`, or a path where you can write"
        raise RunnerError.of(f"--output {path}", problem, write) from None
    return file


def write_file(file: Path, chunks: Iterable[Columns]) -> int:
    """Write chunks of rows, at least one, to a file from check_output(), and return the number of rows.

    The file appears when all are written; one that was there stays until then.

    Raises:
        RunnerError: If a table's cell would have to hold an array.
    """
    num_rows, new = 0, file.with_name(f".{file.name}.writing")

    def checked() -> Iterator[Columns]:
        nonlocal num_rows
        for columns in chunks:
            deep = [f"{name} {each.shape[1:]}" for name, each in columns.items() if getattr(each, "ndim", 1) > 1]
            if deep and file.suffix not in NESTED:
                problem = f"a row of {', '.join(deep)} doesn't fit into a table's cell"
                raise RunnerError.suggest(f"--output {file}", problem, [f"--output {file.with_suffix('.npz')}"])
            num_rows += len(next(iter(columns.values())))
            yield columns

    try:
        WRITERS[file.suffix](new, checked(), file.suffix)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    return num_rows


def _separated(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream, delimiter="\t" if suffix == ".tsv" else ",", lineterminator="\n")
        for number, columns in enumerate(chunks):
            if not number:
                rows.writerow(columns)
            rows.writerows(zip(*map(texts, columns.values()), strict=True))


def _json_lines(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for columns in chunks:
            for row in zip(*map(plain, columns.values()), strict=True):
                line = dict(zip(columns, row, strict=True))
                stream.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def _arrow(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    def typed(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return pyarrow.array(values)
        is_coded = suffix == ".feather" and pyarrow.types.is_dictionary(values.type)
        return values.cast(values.type.value_type) if is_coded else values

    tables = (pyarrow.table({name: typed(values) for name, values in columns.items()}) for columns in chunks)
    first = next(tables)
    with (ParquetWriter if suffix == ".parquet" else pyarrow.ipc.new_file)(str(file), first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table.cast(first.schema))


def _npz(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    parts: dict[str, list[Any]] = {}
    for columns in chunks:
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    # not by np.savez, whose own arguments a column may be called: file, allow_pickle
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in parts:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, joined(parts[name]), allow_pickle=False)


NESTED = (".jsonl", ".npz")  # which hold arrays of any shape
WRITERS: dict[str, Callable[[Path, Iterator[Columns], str], None]] = {
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _arrow,
    ".feather": _arrow,
    ".jsonl": _json_lines,
    ".npz": _npz,
}
