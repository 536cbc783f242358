"""Turns rows of a `datasets` table into tensors: all at once, or batch by batch from the mapped file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.hub.load import IMAGE, TableColumns
from runner.data.language.vocabulary import TextRows
from runner.data.map_style import BatchDataset
from runner.data.tables.values import to_floats
from runner.data.vision.dataset import CHANNELS, Encoded, check_same, decoded, decoded_at_once, each, size_of
from runner.errors import RunnerError

#: evenly spread rows that a fingerprint reads
FINGERPRINT_ROWS = 64
#: between the texts of several columns
BETWEEN = "\n"


@dataclass(frozen=True)
class Reading:
    """How a table's columns become inputs. Worker processes get a copy."""

    columns: TableColumns
    setting: str
    mode: str = "rgb"  # of images
    size: tuple[int, int] | None = None  # of images
    tokens: TextRows | None = None  # of texts
    dtype: str = "float32"  # of numbers; float64 with train.precision=fp64

    def inputs(self, part: Any) -> Tensor:
        """Return (B, ...) from a pyarrow table. Raises: RunnerError for values that are missing or can't be read."""
        if self.tokens is not None:
            texts = zip(*(part.column(name).to_pylist() for name in self.columns.inputs), strict=True)
            return self.tokens.encode([BETWEEN.join(text or "" for text in row) for row in texts])
        if self.columns.form == IMAGE:
            images = _encoded_images(part, self.columns.inputs[0])
            return decoded_at_once(images, _row_names(images), mode=self.mode, size=self.size, asked=self.setting)
        called = f"the columns {', '.join(self.columns.inputs)}"
        return to_floats(self.numbers(part), asked=self.setting, called=called, dtype=getattr(torch, self.dtype))

    def numbers(self, part: Any) -> Any:  # (B, F) float64
        columns = [_numbers(part.column(name), name, self.setting) for name in self.columns.inputs]
        return np.concatenate(columns, axis=1)

    def batch(self, inputs: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets; without targets those are the tokens that follow."""
        if targets is not None:
            return inputs, targets
        assert self.tokens is not None
        return self.tokens.next_tokens(inputs)

    def row_shape(self, table: Any) -> list[int]:
        """Return the shape of a row's inputs."""
        if self.columns.form == IMAGE:
            assert self.size is not None
            return [CHANNELS[self.mode], *self.size]
        if self.tokens is not None:
            return [self.tokens.length - (self.columns.target is None)]
        return list(self.inputs(table.with_format("arrow")[:1]).shape[1:])


class TableRows(BatchDataset):
    """Rows of a table that stays in its file. The process that needs a batch reads it in one piece."""

    def __init__(self, table: Any, reading: Reading, targets: Tensor | None) -> None:
        self._table, self._reading, self._targets = table.with_format("arrow"), reading, targets
        self.fingerprint = fingerprint_of(self._inputs(spread(len(self))), targets)

    def __len__(self) -> int:
        return len(self._table)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        targets = None if self._targets is None else self._targets[torch.tensor(indices)]
        return self._reading.batch(self._inputs(indices), targets)

    def _inputs(self, indices: Sequence[int]) -> Tensor:
        part, reading = self._table[list(indices)], self._reading
        if reading.columns.form != IMAGE:
            return reading.inputs(part)
        images = []
        for index, encoded in zip(indices, _encoded_images(part, reading.columns.inputs[0]), strict=True):
            try:
                images.append(decoded(encoded, mode=reading.mode, size=reading.size))
            except ValueError as error:
                raise RunnerError.of(reading.setting, f"the image of row {index}: {error}", "remove that row") from None
        return torch.stack(images)


def fingerprint_of(some: Tensor, targets: Tensor | None) -> str:
    """Return a digest of some rows as they are read, and of all targets."""
    digest = hashlib.sha256(some.contiguous().numpy().data)
    if targets is not None:
        digest.update(targets.contiguous().numpy().data)
    return digest.hexdigest()


def spread(count: int) -> list[int]:
    indices: list[int] = torch.linspace(0, count - 1, min(count, FINGERPRINT_ROWS)).round().long().tolist()
    return indices


def image_size(table: Any, column: str, *, setting: str) -> tuple[int, int]:
    """Return the size of all images of a column, by their headers. Raises: RunnerError if they differ."""
    images = _encoded_images(table.select_columns([column]).with_format("arrow")[:], column)
    names = _row_names(images)
    sizes = each(range(len(images)), lambda index: size_of(images[index]), names=names, asked=setting)
    return check_same(sizes, names=names, asked=setting)


def target_values(table: Any, column: str, *, setting: str) -> Any:
    """Return (N,) or (N, T) as a NumPy array. Raises: RunnerError for rows without a target."""
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        problem = f"{values.null_count:,} of {len(values):,} rows have no value in column `{column}`"
        raise RunnerError.of(setting, problem, "remove these rows")
    if _is_list(values.type):
        return _numbers(values, column, setting)
    array = values.to_numpy()
    return array.astype(str) if array.dtype.kind == "O" else array


def _encoded_images(part: Any, column: str) -> list[Encoded]:
    images = (one or {} for one in part.column(column).to_pylist())
    return [one["bytes"] if one.get("bytes") is not None else str(one.get("path") or "") or b"" for one in images]


def _row_names(images: Sequence[Encoded]) -> list[str]:
    return [f"the image of row {index}" for index in range(len(images))]


def _numbers(column: Any, name: str, setting: str) -> Any:
    import pyarrow.compute as compute

    values, count = column.combine_chunks(), len(column)
    while _is_list(values.type):
        if len(compute.unique(compute.list_value_length(values))) != 1:  # a missing one has the length None
            problem = f"the lists in column `{name}` differ in length, or some are missing"
            raise RunnerError.of(setting, problem, "use lists of the same length")
        values = values.flatten()
    floats = values.cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return floats.reshape(count, -1)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
