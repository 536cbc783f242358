"""Finds tables (CSV, TSV, Parquet, Feather, DataFrames) and reads their columns in Arrow batches of rows.

Every value of a CSV file is read as text. A row's line is found by a second reading, for errors.
"""

from __future__ import annotations

import csv
import glob
import gzip
import itertools
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.checks import no_such_file
from runner.data.tables.cells import Form
from runner.errors import Problem, RunnerError, first_line

CSV_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PARQUET_ENDINGS = (".parquet", ".pq")
ENDINGS = (*CSV_ENDINGS, *PARQUET_ENDINGS, ".feather", ".arrow")
SEPARATORS = (",", "\t", ";", "|")
BATCH_ROWS = 2**16
#: bytes of a CSV file that are parsed at once, per column and in all; memory grows by about a hundred times the smallest
COLUMN_BYTES, MIN_BLOCK, MAX_BLOCK = 2**14, 2**20, 2**24
#: columns without a name, and pandas' own index: they only number the rows of one file
INDEX = ("", "__index_level_0__")


@dataclass(frozen=True)
class TableFile:
    """A file. Its rows are counted from 0, its lines from 1; `setting` is what the user typed, for messages."""

    path: Path
    setting: str
    form: Form = Form()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_csv(self) -> bool:
        return self.name.lower().endswith(CSV_ENDINGS)

    @property
    def _is_packed(self) -> bool:
        return self.name.lower().endswith(".gz")

    def names(self) -> list[str]:
        """Return the names of all columns that have one. Raises: RunnerError for two with the same name."""
        if self.is_csv:
            names = self.header()
        else:
            with self._arrow() as file:
                names = list((file.schema_arrow if hasattr(file, "schema_arrow") else file.schema).names)
        named = [name for name in names if name not in INDEX]
        if twice := min((name for name in named if named.count(name) > 1), default=None):
            problem = f"`{self.name}` has {named.count(twice)} columns called {twice!r}"
            fix = "rename the columns, or use `data.header=false` if the first line is a row"
            raise RunnerError.of(self.setting, problem, fix)
        return named

    def header(self) -> list[str]:
        """Return the names in the first line of a CSV file; c0, c1, ... if the line is a row. Raises: RunnerError."""
        for names, _ in self._records():
            return [name.strip() if self.form.header else f"c{index}" for index, name in enumerate(names)]
        fix = "use a file with a line of column names and rows below it"
        raise RunnerError.of(self.setting, f"`{self.name}` is empty", fix)

    def batches(self, wanted: Sequence[str]) -> Iterator[Any]:
        """Yield Arrow record batches of these columns, in this order, from a few MiB of memory. Raises: RunnerError."""
        if self.is_csv:
            yield from self._csv_batches(list(wanted))
            return
        with self._arrow() as file:
            for batch in _record_batches(file, list(wanted)):
                yield batch.select(list(wanted))

    def max_bytes(self, num_floats: int) -> int:
        """Return an upper bound of the size of its rows as float32, without reading them."""
        if self.is_csv:  # a value and its separator take two bytes or more
            return self.path.stat().st_size * (16 if self._is_packed else 2)
        with self._arrow() as file:
            is_parquet = hasattr(file, "iter_batches")
            rows = file.metadata.num_rows if is_parquet else sum(batch.num_rows for batch in _record_batches(file, []))
            return int(rows) * num_floats * 4

    def place(self, row: int) -> str:
        """Return `sales.csv, line 17` or `sales.parquet, row 16` (from 1). Reads a CSV file up to there."""
        if not self.is_csv:
            return f"{self.name}, row {row + 1}"
        _, line = next(itertools.islice(self._records(), row + self.form.header, None))
        return f"{self.name}, line {line}"

    def _csv_batches(self, wanted: list[str]) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.csv as pa_csv  # slow to import

        names = self.header()
        numbered = [f"{index}" for index in range(len(names))]  # two columns may have an empty name
        block = min(max(MIN_BLOCK, len(names) * COLUMN_BYTES), MAX_BLOCK)
        read = pa_csv.ReadOptions(block_size=block, column_names=numbered)
        parse = pa_csv.ParseOptions(delimiter=self._separator(), newlines_in_values=True)
        convert = pa_csv.ConvertOptions(
            column_types=dict.fromkeys(numbered, pa.string()),
            include_columns=[numbered[names.index(name)] for name in wanted],
            strings_can_be_null=False,
        )
        packed = "gzip" if self._is_packed else None  # pyarrow knows .gz, but not .GZ
        try:
            with (
                pa.input_stream(self.path, compression=packed) as stream,
                closing(pa_csv.open_csv(stream, read, parse, convert)) as reader,
            ):
                for index, batch in enumerate(reader):
                    rows = batch.slice(1) if index == 0 and self.form.header else batch
                    if rows.num_rows:
                        yield rows.rename_columns(wanted)
        except pa.ArrowMemoryError:
            raise
        except (pa.ArrowException, OSError, EOFError) as error:
            raise RunnerError(self._bad_line(len(names)) or self._not_a_table(error)) from None

    def _separator(self) -> str:
        """Return the separator that occurs most often in the first line."""
        with self._lines() as lines:
            first = next((line for line in lines if line.strip()), "")
        unquoted = "".join(first.split('"')[::2])
        if self.form.decimal == ",":
            unquoted = re.sub(r",(?=\d)", "", unquoted)
        return max(SEPARATORS, key=unquoted.count)

    def _records(self) -> Iterator[tuple[list[str], int]]:
        """Yield the values of each line that is not empty, and the number of the line where they end."""
        separator = self._separator()
        with self._lines() as lines:
            reader = csv.reader(lines, delimiter=separator)
            for values in reader:
                if values:
                    yield values, reader.line_num

    def _bad_line(self, width: int) -> Problem | None:
        try:
            for values, line in self._records():
                if len(values) != width:
                    problem = (
                        f"`{self.name}`, line {line}, has {len(values)} values, and the header names {width} columns"
                    )
                    fix = "correct that line; a value that contains the separator needs quotes"
                    return Problem(self.setting, problem, fix)
        except RunnerError as error:
            return error.problems[0]
        except (OSError, EOFError) as error:
            return self._not_a_table(error)
        return None

    def _not_a_table(self, error: Exception) -> Problem:
        problem = f"`{self.name}` can't be read as a table: {first_line(error)}"
        return Problem(self.setting, problem, "use a complete CSV file in UTF-8, whose lines end with a line feed")

    @contextmanager
    def _lines(self) -> Iterator[Iterator[str]]:
        limit = csv.field_size_limit(MAX_BLOCK)  # a quoted text may be as long as a block
        try:
            with gzip.open(self.path, "rb") if self._is_packed else self.path.open("rb") as stream:
                yield self._decoded(stream)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            problem = f"`{self.name}` is not a complete gzip file: {error}"
            raise RunnerError.of(self.setting, problem, "compress the file again") from None
        except csv.Error as error:
            raise RunnerError(self._not_a_table(error)) from None
        except PermissionError:
            raise self._no_permission() from None
        finally:
            csv.field_size_limit(limit)

    def _decoded(self, stream: Any) -> Iterator[str]:
        for number, raw in enumerate(stream, start=1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                is_utf16 = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
                kind = "UTF-16" if is_utf16 else "another encoding than UTF-8"
                byte = raw[error.start : error.start + 1]
                problem = f"`{self.name}`, line {number}, contains {byte!r}: the file is {kind}"
                fix = f"run `iconv -f {'UTF-16' if is_utf16 else 'WINDOWS-1252'} -t UTF-8 {self.name} > utf8.csv`"
                raise RunnerError.of(self.setting, problem, fix) from None

    @contextmanager
    def _arrow(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        kind = "Parquet" if self.path.suffix.lower() in PARQUET_ENDINGS else "Feather"
        try:
            if kind == "Parquet":
                with parquet.ParquetFile(self.path, memory_map=True) as file:
                    yield file
            else:
                with pa.memory_map(str(self.path)) as source, pa.ipc.open_file(source) as file:
                    yield file
        except PermissionError:
            raise self._no_permission() from None
        except pa.ArrowMemoryError:
            raise
        except (pa.ArrowException, OSError) as error:
            problem = f"`{self.name}` is not a complete {kind} file: {first_line(error)}"
            fix = f"use a file written as {kind}, or give the file the ending of its format"
            raise RunnerError.of(self.setting, problem, fix) from None

    def _no_permission(self) -> RunnerError:
        return RunnerError.of(self.setting, f"no permission to read `{self.name}`", f"run `chmod u+r {self.path}`")


def _record_batches(file: Any, wanted: list[str]) -> Iterator[Any]:
    if hasattr(file, "iter_batches"):  # Parquet
        return iter(file.iter_batches(batch_size=BATCH_ROWS, columns=wanted))
    return (file.get_batch(index) for index in range(file.num_record_batches))


@dataclass(frozen=True)
class TableFrame:
    """A pandas DataFrame, with the methods of a TableFile that an Encoder needs."""

    frame: Any
    setting: str
    form: Form = Form()
    name: str = "the DataFrame"

    def names(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def batches(self, wanted: Sequence[str]) -> Iterator[Any]:
        import pyarrow as pa

        for start in range(0, len(self.frame), BATCH_ROWS):
            part = self.frame.iloc[start : start + BATCH_ROWS]
            yield pa.RecordBatch.from_arrays([_arrow_of(part[name]) for name in wanted], names=list(wanted))

    def place(self, row: int) -> str:
        return f"{self.name}, row {row + 1}"


def _arrow_of(values: Any) -> Any:
    import pandas
    import pyarrow as pa

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas 3.1 deprecates how pyarrow 25 reads dates with zones
            array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if pandas.isna(value) is True else str(value) for value in values], pa.string())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def table_files(path: str | Sequence[str], *, key: str, form: Form | None = None) -> list[TableFile]:
    """Return the files of `path`, by name: a file, a list, a glob, or a directory of parts. Raises: RunnerError."""
    if not isinstance(path, str | Path):
        return [file for item in path for file in table_files(item, key=key, form=form)]
    setting = f"{key}={path}"
    place = Path(path).expanduser()
    pattern = str(place / "**") if place.is_dir() else str(place)
    hits = [place] if place.is_file() else map(Path, glob.glob(pattern, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    paths = sorted(item for item in hits if item.is_file() and (is_table(item) or not place.is_dir()))
    if not paths and place.is_dir():
        problem = f"`{place}` has no tables (files that end in {', '.join(ENDINGS)})"
        raise RunnerError.of(setting, problem, f"use `{key}=FILE.csv`")
    if not paths and glob.has_magic(pattern):
        fix = f"use `{key}='DIRECTORY/*.parquet'`, relative to the current directory"
        raise RunnerError.of(setting, "no file matches the pattern", fix)
    if not paths:
        fix = f"use `{key}=FILE.csv` or `{key}=FILE.parquet`"
        raise RunnerError(no_such_file(setting, place, key, is_table, fix))
    if other := [item for item in paths if not is_table(item)]:
        problem = f"`{other[0].name}` is not a table; files that end in {', '.join(ENDINGS)} are read"
        raise RunnerError.of(setting, problem, "save the table as CSV or Parquet")
    files = [TableFile(item, setting, form or Form()) for item in paths]
    if form is not None and not form.header and (named := [file for file in files if not file.is_csv]):
        problem = f"`{named[0].name}` has column names, as every file of its format"
        raise RunnerError.suggest("data.header=false", problem, ["data.header=true"])
    return files


def shared_names(files: Sequence[TableFile]) -> list[str]:
    """Return the columns of all files, in the order of the first one. Raises: RunnerError if they differ."""
    names = files[0].names()
    for file in files[1:]:
        there = file.names()
        if set(there) != set(names):
            lacks, more = [n for n in names if n not in there], [n for n in there if n not in names]
            what = f"lacks the columns {', '.join(lacks[:5])}" if lacks else f"has more columns: {', '.join(more[:5])}"
            problem = f"`{file.name}` {what}, unlike `{files[0].name}`"
            raise RunnerError.of(file.setting, problem, "use files with the same columns")
    return names


def is_table(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS)
