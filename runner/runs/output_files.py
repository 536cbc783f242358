"""Write columns, a chunk at a time, as a file in the format of its ending, complete or not at all. For `predict` and `history`."""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.errors import RunnerError, nearest

Columns = Mapping[str, NDArray[Any]]


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
            rows.writerows(zip(*map(_texts, columns.values()), strict=True))


def _texts(values: NDArray[Any]) -> list[Any]:
    # the shortest text that is exact in float32
    return [str(value) for value in values] if values.dtype == np.float32 else values.tolist()


def _json_lines(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for columns in chunks:
            for row in zip(*(values.tolist() for values in columns.values()), strict=True):
                stream.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


def _arrow(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    tables = (pyarrow.table(dict(columns)) for columns in chunks)
    first = next(tables)
    with (ParquetWriter if suffix == ".parquet" else pyarrow.ipc.new_file)(str(file), first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table.cast(first.schema))


def _npz(file: Path, chunks: Iterator[Columns], suffix: str) -> None:
    parts: dict[str, list[NDArray[Any]]] = {}
    for columns in chunks:
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    # not by np.savez, whose own arguments a column may be called: file, allow_pickle
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in parts:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.concatenate(parts[name]), allow_pickle=False)


NESTED = (".jsonl", ".npz")  # which hold arrays of any shape
WRITERS: dict[str, Callable[[Path, Iterator[Columns], str], None]] = {
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _arrow,
    ".feather": _arrow,
    ".jsonl": _json_lines,
    ".npz": _npz,
}
