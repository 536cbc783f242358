"""Turns rows of a `datasets` table into tensors: all at once, or batch by batch from the mapped file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.hub.load import IMAGE, TEXT, Chosen
from runner.data.language.vocabulary import TextRows
from runner.data.map_style import BatchDataset
from runner.data.tables.values import MOST_LOOKED_AT, offsets_of, to_floats
from runner.data.vision.dataset import CHANNELS, Encoded, check_same, decoded, decoded_at_once, each, size_of
from runner.errors import RunnerError

#: rows that a fingerprint reads, evenly spread
FINGERPRINT_ROWS = 64
#: of the rows that tell whether float32 has room for the digits: 32 MiB as float64
MOST_NUMBERS = 2**22
#: between the texts of several columns
BETWEEN = "\n"


@dataclass(frozen=True)
class Reading:
    """How a table's columns become inputs; it goes to the loader's workers."""

    chosen: Chosen
    asked: str
    mode: str = "rgb"  # of images
    size: tuple[int, int] | None = None  # of images
    tokens: TextRows | None = None  # of texts
    offsets: tuple[float, ...] = ()  # of numbers: taken off each of a row's while they are float64; () for none

    def inputs(self, part: Any) -> Tensor:
        """(B, ...) from a pyarrow table. Raises: RunnerError for values that are missing or can't be read."""
        if self.chosen.form == TEXT:
            assert self.tokens is not None
            return self.tokens.encode(_texts(part, self.chosen.inputs))
        if self.chosen.form == IMAGE:
            images = _encoded_images(part, self.chosen.inputs[0])
            return decoded_at_once(images, _row_names(part), mode=self.mode, size=self.size, asked=self.asked)
        columns = [_numbers(part.column(name), name, self.asked) for name in self.chosen.inputs]
        numbers = np.concatenate(columns, axis=1)
        if self.offsets:
            numbers -= np.array(self.offsets)
        return to_floats(numbers, asked=self.asked, called=f"the columns {', '.join(self.chosen.inputs)}")

    def batch(self, inputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Inputs and targets; without targets those are the tokens that follow."""
        if targets is not None:
            return inputs, targets
        assert self.tokens is not None
        return self.tokens.next_tokens(inputs)


class TableRows(BatchDataset):
    """Rows of a table that stays in its file. A batch is read in one piece, by the process that needs it."""

    def __init__(self, table: Any, reading: Reading, targets: Tensor | None) -> None:
        self._table, self._reading, self._targets = table.with_format("arrow"), reading, targets
        self.fingerprint = fingerprint_of(self._inputs(_spread(len(self))), targets)

    def __len__(self) -> int:
        return len(self._table)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        targets = None if self._targets is None else self._targets[torch.tensor(indices)]
        return self._reading.batch(self._inputs(indices), targets)

    def _inputs(self, indices: Sequence[int]) -> Tensor:
        part, reading = self._table[list(indices)], self._reading
        if reading.chosen.form != IMAGE:
            return reading.inputs(part)
        images = []
        for index, one in zip(indices, _encoded_images(part, reading.chosen.inputs[0]), strict=True):
            try:
                images.append(decoded(one, mode=reading.mode, size=reading.size))
            except ValueError as error:
                raise RunnerError.of(reading.asked, f"the image of row {index}: {error}", "remove that row") from None
        return torch.stack(images)


def fingerprint_of(some: Tensor, targets: Tensor | None) -> str:
    """Return a digest of some rows as they are read, and of all targets."""
    digest = hashlib.sha256(some.contiguous().numpy().data)
    if targets is not None:
        digest.update(targets.contiguous().numpy().data)
    return digest.hexdigest()


def fingerprint_of_all(inputs: Tensor, targets: Tensor | None) -> str:
    """Return the same digest for rows in memory."""
    return fingerprint_of(inputs[torch.tensor(_spread(len(inputs)))], targets)


def _spread(count: int) -> list[int]:
    indices: list[int] = torch.linspace(0, count - 1, min(count, FINGERPRINT_ROWS)).round().long().tolist()
    return indices


def image_size(table: Any, column: str, *, asked: str) -> tuple[int, int]:
    """Return the size of all images of a column, by their headers. Raises: RunnerError if they differ."""
    part = table.select_columns([column]).with_format("arrow")[:]
    images, names = _encoded_images(part, column), _row_names(part)
    sizes = each(range(len(images)), lambda index: size_of(images[index]), names=names, asked=asked)
    return check_same(sizes, names=names, asked=asked)


def row_shape(table: Any, reading: Reading) -> list[int]:
    """Return the shape of a row's inputs."""
    if reading.chosen.form == IMAGE:
        assert reading.size is not None
        return [CHANNELS[reading.mode], *reading.size]
    if reading.chosen.form == TEXT:
        assert reading.tokens is not None
        return [reading.tokens.length - (reading.chosen.target is None)]
    return list(reading.inputs(table.with_format("arrow")[:1]).shape[1:])


def offsets_in(table: Any, reading: Reading, *, width: int) -> list[tuple[str, float]]:
    """Return each number's name, and its offset (see runner.data.tables.scan), by evenly spread rows."""
    most = min(MOST_LOOKED_AT, max(FINGERPRINT_ROWS, MOST_NUMBERS // width))
    part = table.with_format("arrow")[list(range(0, len(table), -(-len(table) // most)))]
    found: list[tuple[str, float]] = []
    for name in reading.chosen.inputs:
        offsets = offsets_of(_numbers(part.column(name), name, reading.asked))
        names = [name] if len(offsets) == 1 else [f"{name}[{place}]" for place in range(len(offsets))]
        found += zip(names, offsets, strict=True)
    return found


def target_values(table: Any, column: str, *, asked: str) -> Any:
    """Return (N,) or (N, T) as a NumPy array. Raises: RunnerError for rows without a target."""
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        problem = f"{values.null_count:,} of {len(values):,} rows have no value in column `{column}`"
        raise RunnerError.of(asked, problem, "remove these rows")
    if _is_list(values.type):
        return _numbers(values, column, asked)
    array = values.to_numpy()
    return array.astype(str) if array.dtype.kind == "O" else array


def _encoded_images(part: Any, column: str) -> list[Encoded]:
    images = (one or {} for one in part.column(column).to_pylist())
    return [one["bytes"] if one.get("bytes") is not None else str(one.get("path") or "") or b"" for one in images]


def _row_names(part: Any) -> list[str]:
    return [f"the image of row {index}" for index in range(part.num_rows)]


def _texts(part: Any, columns: Sequence[str]) -> list[str]:
    parts = [part.column(name).to_pylist() for name in columns]
    return [BETWEEN.join(text or "" for text in row) for row in zip(*parts, strict=True)]


def _numbers(column: Any, name: str, asked: str) -> Any:
    import pyarrow.compute as compute

    values, count = column.combine_chunks(), len(column)
    while _is_list(values.type):
        if len(compute.unique(compute.list_value_length(values))) != 1:  # one that is missing has the length None
            problem = f"the lists in column `{name}` differ in length, or some are missing"
            raise RunnerError.of(asked, problem, "use lists of the same length")
        values = values.flatten()
    floats = values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return floats.reshape(count, -1)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
