"""Read a user's file as input rows for a run's model, on the host, in chunks: for `predict`.

example() returns a few rows, stored by the run or random, for `export` and `register`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.array_files import ENDINGS as ARRAY_SUFFIXES
from runner.data.array_files import array_inputs
from runner.data.conversion import Conversion
from runner.data.tables.cells import NUMBER, Form
from runner.data.tables.encoder import Column, Columns, Encoder, columns_in
from runner.data.tables.files import ENDINGS as TABLE_ENDINGS
from runner.data.tables.files import TableFile, is_table
from runner.data.tables.table import TableReader
from runner.data.vision.images import named_images
from runner.device.placement import map_tensors, num_rows, tensors
from runner.device.precision import number_type
from runner.errors import RunnerError, first_line, listed, nearest, nearest_files
from runner.experiment.directory import EXAMPLE
from runner.runs.load import RESTORE, Trained, built

ARRAYS = "runner.data.array_inputs"
IMAGES = "runner.data.read_images"


def existing(path: str) -> Path:
    """Return the path of a file or directory. Raises: RunnerError with the most similar names in its directory."""
    file = Path(path).expanduser()
    if file.exists():
        return file
    hits = nearest_files(file, lambda item: bool(nearest(file.name, [item.name])))
    ways = [f"--input {shlex.quote(str(hit))}" for hit in hits]
    problem = f"there is no file `{file.name}` in {file.parent.resolve()}"
    if not file.parent.is_dir():
        problem = f"there is no directory `{file.parent}`"
    raise RunnerError.suggest(f"--input {path}", problem, ways, "use `--input FILE`", code="missing-file")


def chunks(trained: Trained, file: Path, counts: dict[str, dict[str, int]] | None = None) -> Iterator[Any]:
    """Yield trees of tensors that share their first dimension, in the file's order, read by the run's reader if it has one.

    Args:
        counts: Receives `unknown` and `missing`, the rows with unknown categories and without a value, by column.

    Raises:
        RunnerError: The file can't be read, has no rows, or has rows that the model does not accept.
    """
    asked = f"--input {file}"
    node = trained.card.reader
    is_used = node is not None and (node.get("_target_") != ARRAYS or not is_table(file))
    reader = built(node, "reader", trained.folder) if node is not None and is_used else None
    found = _read(trained, file, reader)
    conversion = Conversion(number_type(trained.precision.name))
    count = 0
    for chunk in iter([found]) if tensors(found) else iter(found):
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors(chunk)}
        if len(lengths) != 1:
            problem = f"the reader returned tensors of {' and '.join(map(str, sorted(lengths))) or 'no'} rows"
            raise RunnerError.of(asked, problem, "return tensors with the same first dimension")
        count += num_rows(chunk)
        if num_rows(chunk):
            yield conversion.cast(chunk)
    if not count:
        raise RunnerError.of(asked, f"`{file}` has no rows", "use a file with rows")
    if counts is not None and isinstance(reader, TableReader):
        counts |= {"unknown": reader.unknown, "missing": reader.missing}


def files_of(trained: Trained, file: Path) -> list[str] | None:
    """Return the path of each row's image, for a run on images; None if rows have no separate files."""
    node = trained.card.reader
    return [str(image) for image in named_images(file)] if node is not None and node.get("_target_") == IMAGES else None


def pieces(chunk: Any, rows: int) -> Iterator[Any]:
    """Yield a chunk in batches of `rows` rows."""
    for start in range(0, num_rows(chunk), rows):
        yield map_tensors(chunk, lambda tensor, at=start: tensor[at : at + rows])  # type: ignore[misc]


def example(trained: Trained) -> Any:
    """Return a few rows of the model's inputs, on the host: those that the run stored, else random or zero."""
    if (file := trained.folder / EXAMPLE).is_file():
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of pickle or zip
            raise RunnerError.of(str(file), f"the file can't be read: {first_line(error)}", RESTORE) from error
    if (columns := columns_in(trained.card.reader)) is not None:
        return torch.zeros(4, columns.num_floats, dtype=getattr(torch, columns.dtype))  # 0 is a category, too
    shape, vocab_size = trained.card.facts.get("input_shape"), trained.card.facts.get("vocab_size")
    if not isinstance(shape, list):
        problem = f"the run has no `{EXAMPLE}`, so the shape of its rows is unknown"
        raise RunnerError.of(str(trained.folder), problem, "use a finished run")
    if vocab_size:
        return torch.randint(vocab_size, (4, *shape))
    rows = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    return rows.to(number_type(trained.precision.name))


def _read(trained: Trained, file: Path, reader: Callable[[str], Any] | None) -> Any:
    asked = f"--input {file}"
    if reader is not None:
        is_plain = (trained.card.reader or {}).get("_target_") == ARRAYS
        try:
            rows = reader(str(file))
        except RunnerError:
            raise
        except Exception as error:
            problem = f"the run's reader failed with {type(error).__name__}: {error}"
            raise RunnerError.of(asked, problem, "use a file like the run's own data") from error
        return (_fitting(tensor, trained, file) for tensor in rows) if is_plain else rows
    shape = trained.card.facts.get("input_shape")
    dtype = str(number_type(trained.precision.name)).removeprefix("torch.")
    if is_table(file):
        width = math.prod(shape) if isinstance(shape, list) else None
        found = map(torch.from_numpy, table_rows(file, width=width, dtype=dtype))
        return (_shaped(tensor, shape) for tensor in found)
    if file.is_dir() or file.suffix not in ARRAY_SUFFIXES:
        problem = f"the run's data (`{trained.card.data}`) has no reader for such files"
        fix = f"use a file that ends in {', '.join((*ARRAY_SUFFIXES, *TABLE_ENDINGS))}"
        raise RunnerError.of(asked, problem, fix)
    read = array_inputs(str(file), float_inputs=not trained.card.facts.get("vocab_size"), dtype=dtype)
    return (_fitting(tensor, trained, file) for tensor in read)


def table_rows(file: Path, *, width: int | None, dtype: str = "float32") -> Iterator[Any]:
    """Yield (n, columns) floats of a table for a run that has no reader for tables. width: The model's number of columns.

    A CSV file whose first line has only numbers has no header.

    Raises:
        RunnerError: The table has another number of columns, or a value that is not a finite number.
    """
    table, fix = TableFile(file, f"--input {file}", Form()), "correct or remove those rows"
    if table.is_csv and all(re.match(NUMBER, name) for name in table.header()):
        table = TableFile(file, table.setting, Form(header=False))
    names = table.names()
    if width is not None and len(names) != width:
        problem = f"the table has {len(names)} columns ({listed(names)}), and the run's model takes {width}"
        raise RunnerError.of(table.setting, problem, f"use a table with exactly {width} columns of numbers")
    encoder = Encoder(Columns(tuple(Column(name, "number") for name in names), dtype=dtype), fix=fix)
    for rows, _, place in encoder.chunks([table]):
        if (missing := np.isnan(rows)).any():
            row, column = np.argwhere(missing)[0]
            problem = f"{place.of(int(row))}, column {names[column]!r}, is missing, and the run's model takes numbers"
            raise RunnerError.of(table.setting, problem, fix)
        yield rows


def _shaped(rows: Tensor, shape: Any) -> Tensor:
    return rows.reshape(len(rows), *shape) if isinstance(shape, list) else rows


def _fitting(rows: Tensor, trained: Trained, file: Path) -> Tensor:
    shape = trained.card.facts.get("input_shape")
    if not isinstance(shape, list) or list(rows.shape[1:]) == shape:
        return rows
    if not rows.is_floating_point() and rows.dim() == 2 and len(shape) == 1 and rows.shape[1] < shape[0]:
        return rows
    flat = math.prod(shape)
    if rows.dim() == 2 and rows.shape[1] == flat:
        return _shaped(rows, shape)
    problem = f"the rows have the shape {tuple(rows.shape[1:])}, and the run's model takes {tuple(shape)}"
    fix = "use rows like the run's own data, without targets"
    if file.suffix == ".npy" and rows.dim() == 2 and rows.shape[1] == flat + 1:
        problem += "; the last column may be the target"
        fix = f"run `np.save('inputs.npy', np.load({file.name!r})[:, :-1])`, then use `--input inputs.npy`"
    raise RunnerError.of(f"--input {file}", problem, fix)
