"""Reads CSV and TSV files in batches of rows, every value a text, and finds the line in the file of a row."""

from __future__ import annotations

import csv
import gzip
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from runner.data.tables.forms import Form
from runner.errors import Problem, RunnerError, first_line

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
SEPARATORS = (",", "\t", ";", "|")
#: bytes that are parsed at once, for each column and for all: reading takes about a hundred times the least of them
#: (blocks of 1, 2 and 8 MiB: 110, 200 and 380 MiB; pyarrow 25, 2026-11), and fewer cost time where columns are many
COLUMN_BYTES, LEAST_BLOCK, MOST_BLOCK = 2**14, 2**20, 2**24


def header(file: Path, *, form: Form, asked: str) -> list[str]:
    """The names in the first line, without spaces around them; c0, c1 and so on where it is a row.

    Raises: RunnerError for an empty file.
    """
    with _text(file, asked) as stream:
        for names in csv.reader(stream, delimiter=separator(file, form, asked=asked)):
            if names:
                return [name.strip() if form.header else f"c{index}" for index, name in enumerate(names)]
    raise RunnerError.of(asked, f"`{file.name}` is empty", "use a file with a line of column names and rows below it")


def separator(file: Path, form: Form, *, asked: str) -> str:
    """Of the comma, tab, semicolon and bar the one that parts most names in the first line.

    With a decimal comma those before a digit part none: 7,60;6,82;29,62 has more of them than of what parts its values.
    """
    with _text(file, asked) as stream:
        first = next((line for line in stream if line.strip()), "")
    outside = "".join(first.split('"')[::2])  # what stands in quotes is part of a name
    if form.decimal == ",":
        outside = re.sub(r",(?=\d)", "", outside)
    return max(SEPARATORS, key=outside.count)


def batches(file: Path, wanted: Sequence[str], *, form: Form, asked: str) -> Iterator[Any]:
    """pyarrow record batches of the columns `wanted`, in that order, as texts. Reads one block of the file at a time.

    Raises: RunnerError for a row with too few or too many values and for bytes that are no UTF-8, with its line.
    """
    import pyarrow as pa
    import pyarrow.csv as pa_csv  # heavy, and nothing but a table needs it

    names = header(file, form=form, asked=asked)
    numbered = [f"{index}" for index in range(len(names))]  # two columns may have an empty name
    block = min(max(LEAST_BLOCK, len(names) * COLUMN_BYTES), MOST_BLOCK)
    chosen = [numbered[names.index(name)] for name in wanted]
    read = pa_csv.ReadOptions(block_size=block, column_names=numbered, skip_rows_after_names=0)
    parse = pa_csv.ParseOptions(delimiter=separator(file, form, asked=asked), newlines_in_values=True)
    convert = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(numbered, pa.string()), include_columns=chosen, strings_can_be_null=False
    )
    packed = "gzip" if is_packed(file) else None  # pyarrow would know .gz, and not .GZ
    try:
        with (
            pa.input_stream(file, compression=packed) as stream,
            closing(pa_csv.open_csv(stream, read, parse, convert)) as reader,
        ):
            for index, batch in enumerate(reader):
                rows = batch.slice(1) if index == 0 and form.header else batch
                if rows.num_rows:
                    yield rows.rename_columns(list(wanted))
    except pa.ArrowMemoryError:
        raise  # nothing is wrong with the file
    except (pa.ArrowException, OSError, EOFError) as error:
        raise RunnerError(_unreadable(file, form, len(names), error, asked)) from None


def line(file: Path, row: int, *, form: Form, asked: str = "") -> int:
    """Where row number `row` (from 0) ends, as an editor counts lines, from 1. Reads the file up to there."""
    with _text(file, asked) as stream:
        reader = csv.reader(stream, delimiter=separator(file, form, asked=asked))
        count = -1 if form.header else 0  # of rows before this line
        for values in reader:
            if values:
                if count == row:
                    return reader.line_num
                count += 1
        return reader.line_num


def _unreadable(file: Path, form: Form, width: int, error: Exception, asked: str) -> Problem:
    try:
        with _text(file, asked) as stream:
            reader = csv.reader(stream, delimiter=separator(file, form, asked=asked))
            for values in reader:
                if values and len(values) != width:
                    problem = f"`{file.name}`, line {reader.line_num}, has {len(values)} values, and the header names {width} columns"
                    return Problem(
                        asked, problem, "correct that line; a value that contains the separator needs quotes"
                    )
    except RunnerError as found:
        return found.problems[0]
    except (OSError, EOFError) as found_error:
        error = found_error
    return _no_table(file, error, asked)


def _no_table(file: Path, error: Exception, asked: str) -> Problem:
    if isinstance(error, csv.Error) and "new-line" in str(error):
        quoted = shlex.quote(file.name)
        problem = f"the lines of `{file.name}` end with a carriage return only, as from old Excel on a Mac"
        unpacked = f"gunzip -c {quoted} | tr '\\r' '\\n'" if is_packed(file) else f"tr '\\r' '\\n' < {quoted}"
        return Problem(asked, problem, f"run `{unpacked} > unix.csv`")
    problem = f"`{file.name}` can't be read as a table: {first_line(error)}"
    return Problem(asked, problem, "use a complete CSV file, saved as UTF-8")


def is_packed(file: Path) -> bool:
    return file.name.lower().endswith(".gz")


@contextmanager
def _text(file: Path, asked: str) -> Iterator[Iterator[str]]:
    before = csv.field_size_limit(MOST_BLOCK)  # a quoted text may be as long as a block
    try:
        with gzip.open(file, "rb") if is_packed(file) else file.open("rb") as stream:
            yield _decoded(stream, file, asked)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        problem = f"`{file.name}` is not a complete gzip file: {error}"
        raise RunnerError.of(asked, problem, "compress the file again") from None
    except csv.Error as error:
        raise RunnerError(_no_table(file, error, asked)) from None
    except PermissionError:
        raise RunnerError.of(asked, f"no permission to read `{file.name}`", f"run `chmod u+r {file}`") from None
    finally:
        csv.field_size_limit(before)


def _decoded(stream: Any, file: Path, asked: str) -> Iterator[str]:
    number = 0
    for number, raw in enumerate(stream, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            kind = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "another encoding than UTF-8"
            problem = (
                f"`{file.name}`, line {number}, contains {raw[error.start : error.start + 1]!r}: the file is {kind}"
            )
            fix = f"run `iconv -f {'UTF-16' if kind == 'UTF-16' else 'WINDOWS-1252'} -t UTF-8 {file.name} > utf8.csv`"
            raise RunnerError.of(asked, problem, fix) from None
