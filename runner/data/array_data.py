"""Makes a Source of a file of arrays (npz, npy, safetensors): `data=arrays`. Reads inputs for prediction, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.array_files import TABLE, Arrays, opened
from runner.data.map_style import Conversion
from runner.data.source import GIVEN, Source, from_arrays
from runner.data.tables.values import to_inputs
from runner.data.vision.augment import augmented
from runner.data.vision.images import normalised
from runner.errors import Problem, RunnerError, nearest, refuse

READER = "runner.data.array_inputs"
IMAGE_DIMS = 4  # (N, C, H, W)
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)
#: of inputs without targets, read at a time
ROWS_A_CHUNK = 65_536
#: the last column of a table of floats is taken as classes up to so many different whole numbers
MOST_CLASSES_IN_A_COLUMN = 100


def arrays(
    path: str,
    inputs: str = "x",
    *,
    targets: str = "y",
    targets_path: str | None = None,
    kind: str = "auto",
    float_inputs: bool = True,
    augment: Mapping[str, Any] | Sequence[Any] | None = None,
) -> Source:
    """The arrays `inputs` (N, ...) and `targets` (N,) or (N, T) of a file, by their names in it.

    npz, safetensors: where the file has x_train and y_train instead of x and y, they are taken, and x_val, y_val,
    x_test and y_test are its own splits. npy: the targets lie in `targets_path` or in the last column of a table.
    targets_path: another file for the targets. kind: auto (floats are a regression, all else classes),
    classification, regression. float_inputs=False leaves integers as they are, for rows of tokens (small ones become
    int32, which embeddings take) and for images (C, H, W) of bytes, which a layer before the model normalises.
    augment: of inputs that are images (C, H, W), see runner.data.vision.augment.
    Raises: RunnerError for a file that is missing, unreadable or lacks what is asked for, and for NaN.
    """
    settings: dict[str, Any] = {"kind": kind, "conversion": Conversion(keeps_integers=not float_inputs), "origin": path}
    reader = {"_target_": READER, "_partial_": True, "inputs": inputs, "float_inputs": float_inputs}
    with ExitStack() as stack:
        found = stack.enter_context(opened(path, key="data.path"))
        if targets_path is not None:
            others = stack.enter_context(opened(targets_path, key="data.targets_path"))
        elif TABLE in found:
            return _finished(_from_table(found[TABLE], path, settings), {}, reader, augment)
        else:
            others = found
        has_splits = found is others and inputs not in found and targets not in found and f"{inputs}_train" in found
        suffix = "_train" if has_splits else ""
        columns = (
            Column("data.inputs", inputs, targets, found, path),
            Column("data.targets", targets, inputs, others, targets_path or path),
        )
        train = _part(columns, suffix, path, settings)
        there = [name for name in GIVEN if suffix and any(f"{c.name}_{name}" in found for c in columns)]
        given = {name: _part(columns, f"_{name}", path, settings, like=train).rows for name in there}
        return _finished(train, given, reader, augment)


def array_inputs(path: str, *, inputs: str = "x", float_inputs: bool = True) -> Iterator[Tensor]:
    """The rows of one array, (n, ...) at a time and without targets, as arrays() reads them: the reader of its runs.

    npz, safetensors: the array called `inputs`, or the only one there is. npy: mapped, so that a chunk is in memory.
    Raises: RunnerError for a file that is missing, unreadable or lacks the array, and for NaN.
    """
    with opened(path, key="--input") as found:
        names = list(found)
        if inputs not in names and len(names) != 1:
            listed = ", ".join(f"{name} {shape}" for name, shape in found.shapes.items()) or "nothing in it"
            problem = f"`{Path(path).name}` has no array `{inputs}`; it has {listed}"
            raise RunnerError.of(f"--input {path}", problem, f"save the rows as `{inputs}`", code="unknown-option")
        name = inputs if inputs in names else names[0]
        array = found[name]
        for start in range(0, len(array), ROWS_A_CHUNK) if len(found.shapes[name]) else ():
            called = f"rows {start + 1:,} and on of {Path(path).name}" if start else f"the rows of {Path(path).name}"
            rows = array[start : start + ROWS_A_CHUNK]
            yield _as_embeddings_take(
                to_inputs(rows, asked=f"--input {path}", called=called, keep_integers=not float_inputs)
            )


def _finished(source: Source, given: Mapping[str, Any], reader: dict[str, Any], augment: Any) -> Source:
    inputs, targets = source.rows
    are_images = inputs.dtype == torch.uint8 and inputs.dim() == IMAGE_DIMS
    rows = (_as_embeddings_take(inputs), targets)
    given = {name: (_as_embeddings_take(some), others) for name, (some, others) in given.items()}
    around = normalised if are_images else None
    return augmented(replace(source, rows=rows, given=given, reader=reader, around=around), augment)


def _as_embeddings_take(inputs: Tensor) -> Tensor:
    """Rows of small integers, (N, T), as int32: torch's embeddings take no smaller ones."""
    return inputs.int() if inputs.dim() == 2 and inputs.dtype in SMALL_INTEGERS else inputs


@dataclass(frozen=True)
class Column:
    """One of the two things that a file is asked for."""

    key: str  # data.inputs or data.targets
    name: str
    other: str  # the name of the other one, which it can't be
    found: Arrays
    path: str

    def problem(self, suffix: str) -> Problem | None:
        """What to write when the file does not have it."""
        if TABLE in self.found or self.name + suffix in self.found:
            return None
        listed = ", ".join(f"{item} {shape}" for item, shape in self.found.shapes.items()) or "nothing in it"
        names = [item.removesuffix(suffix) for item in self.found if item.endswith(suffix)]
        names = [name for name in names if name != self.other]
        ways = [f"{self.key}={hit}" for hit in (nearest(self.name, names) or names)[:3]]
        problem = f"`{Path(self.path).name}` has no array `{self.name}{suffix}`; it has {listed}"
        return Problem.suggest(
            f"{self.key}={self.name}",
            problem,
            ways,
            f"use a file with an array `{self.name}{suffix}`",
            code="unknown-option",
        )

    def called(self, suffix: str) -> str:
        file = Path(self.path).name
        return f"the array of {file}" if TABLE in self.found else f"array {self.name}{suffix} of {file}"

    def read(self, suffix: str) -> Any:
        return self.found[TABLE if TABLE in self.found else self.name + suffix]


def _part(
    columns: tuple[Column, Column], suffix: str, path: str, settings: dict[str, Any], *, like: Source | None = None
) -> Source:
    refuse([problem for column in columns if (problem := column.problem(suffix))])
    inputs, targets = columns
    return from_arrays(
        inputs.read(suffix),
        targets.read(suffix),
        name=Path(path).stem,
        asked=f"data.path={path}",
        called=(inputs.called(suffix), targets.called(suffix)),
        like=like,
        **settings,
    )


def _from_table(table: Any, path: str, settings: dict[str, Any]) -> Source:
    asked = f"data.path={path}"
    if table.ndim != 2 or table.shape[1] < 2:
        problem = f"the array has the shape {table.shape}; without `data.targets_path` the targets are the last column of a table"
        raise RunnerError.of(asked, problem, "use `data.targets_path=FILE.npy`")
    targets = table[:, -1]
    if settings["kind"] == "auto" and table.dtype.kind in "fiu":
        values = np.unique(targets)
        are_classes = len(values) <= MOST_CLASSES_IN_A_COLUMN and np.array_equal(values, np.round(values))
        said = f"{len(values)} classes in its last column" if are_classes else "its last column is a regression's"
        settings |= {"kind": "classification" if are_classes else "regression", "origin": f"{path} (auto: {said})"}
    called = ("the columns but the last", "the last column")
    return from_arrays(table[:, :-1], targets, name=Path(path).stem, asked=asked, called=called, **settings)
