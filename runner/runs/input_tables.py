"""Reads a table's file, a chunk at a time: its numbers (for inputs.py, where the run has no reader for it), or its columns.

predict.py keeps the columns beside the answers (--keep).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.tables import csv
from runner.data.tables.arrow_values import NUMBER
from runner.data.tables.encoder import Column, Columns, Encoder, listed
from runner.data.tables.files import ENDINGS as ENDINGS
from runner.data.tables.files import TableFile
from runner.data.tables.files import is_table as is_table
from runner.data.tables.forms import Form
from runner.errors import RunnerError

FIX = "correct or remove those rows"


def columns(file: Path, *, form: Form | None = None) -> Iterator[Any]:
    """Arrow batches of all columns; of a CSV, the texts that stand there. form: how it is written; None to guess its header.

    Raises: RunnerError for a file that can't be read.
    """
    table = TableFile(file, f"--input {file}", form) if form is not None else _table(file)
    yield from table.batches(table.names())


def numbers(file: Path, *, width: int | None) -> Iterator[Any]:
    """(n, columns) float32 for each chunk. width: how many columns there must be; None for any.

    Raises: RunnerError for another number of columns, and for cells that are no finite number, with row and column.
    """
    table = _table(file)
    names = table.names()
    if width is not None and len(names) != width:
        problem = f"the table has {len(names)} columns ({listed(names)}), and the run's model takes {width}"
        raise RunnerError.of(table.asked, problem, f"use a table with exactly {width} columns of numbers")
    encoder = Encoder(Columns(tuple(Column(name, "number") for name in names)), fix=FIX)
    for rows, _, place in encoder.chunks([table]):
        if (missing := np.isnan(rows)).any():
            row, column = np.argwhere(missing)[0]
            problem = f"{place.of(int(row))}, column {names[column]!r}, is missing, and the run's model takes numbers"
            raise RunnerError.of(table.asked, problem, FIX)
        yield rows


def _table(file: Path) -> TableFile:
    table = TableFile(file, f"--input {file}")
    if table.is_csv and all(re.match(NUMBER, name) for name in csv.header(file, form=table.form, asked=table.asked)):
        return TableFile(file, table.asked, Form(header=False))
    return table
