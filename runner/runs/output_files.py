"""Write columns, a chunk at a time, as a file in the format of its ending, complete or not at all. For `predict` and `history`.

A column is a NumPy array, or an Arrow ChunkedArray, whose type and missing values stay if the format has them.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runner.errors import RunnerError, nearest


def texts(values: Any) -> list[Any]:
    """Return what csv.writer writes; None (empty) for a missing value, and float32 in its shortest exact form."""
    if isinstance(values, np.ndarray):
        return [str(value) for value in values] if values.dtype == np.float32 else values.tolist()
    found = plain(values)
    if str(values.type) == "float":
        return [None if value is None else str(np.float32(value)) for value in found]
    return [json.dumps(value, default=str) if isinstance(value, list | dict) else value for value in found]


def plain(values: Any) -> list[Any]:
    """Return Python values, None for a missing one."""
    found: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    return found


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


Write = Callable[[Mapping[str, Any]], None]


def check_output(path: str, *, inputs: Path) -> Path:
    """Return the file to write. Raises: RunnerError for an unknown ending, the input file, or a path that can't be written."""
    file = Path(path).expanduser()
    if file.suffix not in OPENERS:
        hits = nearest(file.suffix, OPENERS) or list(OPENERS)
        problem = f"the format `{file.suffix or 'without an ending'}` can't be written; there are {', '.join(OPENERS)}"
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


@contextmanager
def writing(file: Path) -> Iterator[Write]:
    """A function that appends a chunk. The file appears when the block ends well; one that was there stays until then."""
    beside = file.with_name(f".{file.name}.writing")
    try:
        with OPENERS[file.suffix](beside, file) as write:
            yield write
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _separated(file: Path, target: Path) -> Iterator[Write]:
    import csv

    with file.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream, delimiter="\t" if target.suffix == ".tsv" else ",", lineterminator="\n")
        is_first = True

        def write(columns: Mapping[str, Any]) -> None:
            nonlocal is_first
            _check_flat(columns, target)
            if is_first:
                rows.writerow(columns)
                is_first = False
            rows.writerows(zip(*map(texts, columns.values()), strict=True))

        yield write


@contextmanager
def _json_lines(file: Path, target: Path) -> Iterator[Write]:
    with file.open("w", encoding="utf-8") as stream:

        def write(columns: Mapping[str, Any]) -> None:
            names = list(columns)
            for row in zip(*map(plain, columns.values()), strict=True):
                line = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, default=str)
                stream.write(line + "\n")

        yield write


@contextmanager
def _arrow(file: Path, target: Path) -> Iterator[Write]:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    open_writer = ParquetWriter if target.suffix == ".parquet" else pyarrow.ipc.new_file
    with ExitStack() as stack:
        writer: Any = None

        def write(columns: Mapping[str, Any]) -> None:
            nonlocal writer
            _check_flat(columns, target)
            table = pyarrow.table({name: _in_arrow(values, target) for name, values in columns.items()})
            if writer is None:
                writer = stack.enter_context(open_writer(str(file), table.schema))
            writer.write_table(table.cast(writer.schema) if hasattr(writer, "schema") else table)

        yield write


@contextmanager
def _npz(file: Path, target: Path) -> Iterator[Write]:
    kept: dict[str, list[Any]] = {}

    def write(columns: Mapping[str, Any]) -> None:
        for name, values in columns.items():
            kept.setdefault(name, []).append(values)

    yield write
    # not by np.savez, whose own arguments a column may be called: file, allow_pickle
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, parts in kept.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, joined(parts), allow_pickle=False)


def _in_arrow(values: Any, file: Path) -> Any:
    import pyarrow

    if isinstance(values, np.ndarray):
        return pyarrow.array(values)
    is_coded = file.suffix == ".feather" and pyarrow.types.is_dictionary(values.type)
    return values.cast(values.type.value_type) if is_coded else values


def _check_flat(columns: Mapping[str, Any], file: Path) -> None:
    deep = [f"{name} {values.shape[1:]}" for name, values in columns.items() if getattr(values, "ndim", 1) > 1]
    if deep:
        problem = f"a row of {', '.join(deep)} doesn't fit into a table's cell"
        raise RunnerError.suggest(f"--output {file}", problem, [f"--output {file.with_suffix('.npz')}"])


OPENERS: dict[str, Callable[[Path, Path], AbstractContextManager[Write]]] = {
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _arrow,
    ".feather": _arrow,
    ".jsonl": _json_lines,
    ".npz": _npz,
}
