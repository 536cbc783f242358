"""Finds table files by a path, a glob, a folder or a list of them; each gives its columns, and its rows in batches."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.data.array_files import no_such_file
from runner.data.tables import csv
from runner.data.tables.forms import Form
from runner.errors import RunnerError, first_line

ARROW_ENDINGS = (".parquet", ".pq", ".feather", ".arrow")
ENDINGS = (*csv.ENDINGS, *ARROW_ENDINGS)
BATCH_ROWS = 2**16
#: columns without a name, and pandas' own index: a count of the rows, that no other file's rows share
INDEX = ("", "__index_level_0__")


@dataclass(frozen=True)
class TableFile:
    """One file. Its rows are counted from 0, its lines from 1."""

    path: Path
    asked: str  # how messages say what was asked for: data.path=...
    form: Form = Form()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_csv(self) -> bool:
        return self.path.name.lower().endswith(csv.ENDINGS)

    def names(self) -> list[str]:
        """Of all columns but nameless ones. Raises: RunnerError for a file that is no table, and for a name used twice."""
        if self.is_csv:
            names = csv.header(self.path, form=self.form, asked=self.asked)
        else:
            with self._arrow() as file:
                names = list((file.schema_arrow if hasattr(file, "schema_arrow") else file.schema).names)
        found = [name for name in names if name not in INDEX]
        if twice := sorted({name for name in found if found.count(name) > 1}) if len(set(found)) < len(found) else []:
            problem = f"`{self.path.name}` has {found.count(twice[0])} columns called {twice[0]!r}"
            fix = "rename the columns, or use `data.header=false` if the first line is a row"
            raise RunnerError.of(self.asked, problem, fix)
        return found

    def batches(self, wanted: Sequence[str]) -> Iterator[Any]:
        """pyarrow record batches of the columns `wanted`, in that order. Holds a few MiB of the file at a time."""
        if self.is_csv:
            yield from csv.batches(self.path, wanted, form=self.form, asked=self.asked)
            return
        with self._arrow() as file:
            if hasattr(file, "iter_batches"):
                found = file.iter_batches(batch_size=BATCH_ROWS, columns=list(wanted))
                yield from (batch.select(list(wanted)) for batch in found)
            else:
                for index in range(file.num_record_batches):
                    yield file.get_batch(index).select(list(wanted))

    def num_bytes(self, width: int) -> int:
        """Of its rows as `width` float32 each, at most, and without reading them: a text of a value has 2 bytes or more."""
        if self.is_csv:
            return self.path.stat().st_size * (16 if csv.is_packed(self.path) else 2)
        with self._arrow() as file:
            if hasattr(file, "metadata") and hasattr(file.metadata, "num_rows"):
                return int(file.metadata.num_rows) * width * 4
            rows: int = sum(file.get_batch(index).num_rows for index in range(file.num_record_batches))
            return rows * width * 4

    def place(self, row: int) -> str:
        """`sales.csv, line 17`, or `sales.parquet, row 16` (from 1)."""
        if self.is_csv:
            return f"{self.path.name}, line {csv.line(self.path, row, form=self.form, asked=self.asked)}"
        return f"{self.path.name}, row {row + 1}"

    @contextmanager
    def _arrow(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        kind = "Parquet" if self.path.suffix.lower() in (".parquet", ".pq") else "Feather"
        try:
            if kind == "Parquet":
                with parquet.ParquetFile(self.path, memory_map=True) as file:
                    yield file
            else:
                with pa.memory_map(str(self.path)) as source, pa.ipc.open_file(source) as file:
                    yield file
        except PermissionError:
            problem = f"no permission to read `{self.path.name}`"
            raise RunnerError.of(self.asked, problem, f"run `chmod u+r {self.path}`") from None
        except pa.ArrowMemoryError:
            raise  # nothing is wrong with the file
        except (pa.ArrowException, OSError) as error:
            problem = f"`{self.path.name}` is not a complete {kind} file: {first_line(error)}"
            fix = f"use a file written as {kind}, or give the file the ending of its format"
            raise RunnerError.of(self.asked, problem, fix) from None


def table_files(path: str | Sequence[str], *, key: str, form: Form | None = None) -> list[TableFile]:
    """The files that `path` names, in the order of their names: a file, a list, a glob, a folder of parts.

    Raises: RunnerError where there is none, with the nearest names, and for endings that are not read here.
    """
    if not isinstance(path, str | Path):
        return [file for item in path for file in table_files(item, key=key, form=form)]
    asked = f"{key}={path}"
    place = Path(path).expanduser()
    if place.is_file():
        found = [place]
    elif place.is_dir():
        found = sorted(item for item in place.rglob("*") if item.is_file() and is_table(item))
        if not found:
            problem = f"there are no tables in `{place}` (files that end in {', '.join(ENDINGS)})"
            raise RunnerError.of(asked, problem, f"use `{key}=FILE.csv`")
    else:
        found = sorted(Path(item) for item in glob.glob(str(place), recursive=True) if Path(item).is_file())  # noqa: PTH207 (Path.glob takes no absolute pattern)
        if not found:
            if glob.has_magic(str(place)):
                fix = f"use `{key}='DIRECTORY/*.parquet'`, relative to the current directory"
                raise RunnerError.of(asked, "no file matches the pattern", fix)
            raise RunnerError(
                no_such_file(asked, place, key, is_table, f"use `{key}=FILE.csv` or `{key}=FILE.parquet`")
            )
    if other := [item for item in found if not is_table(item)]:
        problem = f"`{other[0].name}` is not a table; files that end in {', '.join(ENDINGS)} are read"
        raise RunnerError.of(asked, problem, "save the table as CSV or Parquet")
    files = [TableFile(item, asked, form or Form()) for item in found]
    if form is not None and not form.header and (named := [file for file in files if not file.is_csv]):
        problem = f"`{named[0].path.name}` has column names, as every file of its format"
        raise RunnerError.suggest("data.header=false", problem, ["data.header=true"])
    return files


def shared_names(files: Sequence[TableFile]) -> list[str]:
    """The columns that all files have, in the first one's order. Raises: RunnerError for one that lacks some."""
    names = files[0].names()
    for file in files[1:]:
        there = file.names()
        if set(there) != set(names):
            lacks, more = [n for n in names if n not in there], [n for n in there if n not in names]
            what = f"lacks the columns {', '.join(lacks[:5])}" if lacks else f"has more columns: {', '.join(more[:5])}"
            problem = f"`{file.path.name}` {what}, unlike `{files[0].path.name}`"
            raise RunnerError.of(file.asked, problem, "use files with the same columns")
    return names


def is_table(path: Path) -> bool:
    """Whether its ending is one that is read here."""
    return path.name.lower().endswith(ENDINGS)
