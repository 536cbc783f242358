"""Makes a Source of a set of Hugging Face's `datasets` library (numbers, images or texts); reads such files for predictions."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from runner.config.checks import Count, one_of
from runner.data.conversion import BatchDataset, Called, to_floats, to_targets
from runner.data.hub.load import IMAGE, TEXT, HubColumns, choose_columns, described, form_of, load_tables
from runner.data.language.text import TextRows, entries_of
from runner.data.source import Source
from runner.data.tables.cells import LIKE_A_DATE
from runner.data.tables.choose import holds_dates
from runner.data.vision.augment import Augmentations, augmented
from runner.data.vision.dataset import (
    CHANNELS,
    Decode,
    Encoded,
    Mode,
    Size,
    decoded_at_once,
    is_decoded_once,
    same_size,
    sides_of,
)
from runner.data.vision.images import normalised, read_images
from runner.errors import RunnerError, nearest

log = logging.getLogger("runner")

READER = "runner.data.read_rows"
#: evenly spread rows that a fingerprint reads, and rows that a prediction reads at a time
FINGERPRINT_ROWS, BLOCK = 64, 4096
#: between the texts of several columns
BETWEEN = "\n"


def huggingface(
    path: str,
    subset: str | None = None,
    *,
    split: Mapping[str, str] | None = None,
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    kind: Annotated[str, one_of(("auto", "classification", "regression", "language"))] = "auto",
    size: Size | None = None,
    mode: Mode = "rgb",
    tokenizer: str = "bytes",
    context_length: Count = 256,
    decode: Decode = "auto",
    augment: Augmentations = None,
    like: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> Source:
    """Return rows of numbers (F,), of images (C, H, W) uint8 or of tokens (T,) int64.

    Args:
        path: A set of the Hub; or csv, json, parquet, arrow or text, with data_files; or a file or directory. The other
            arguments are explained in conf/data/huggingface.yaml.
        like: The reader of an earlier run, whose columns, classes and tokens hold.
        dtype: Of numbers, float32 or float64 (train.precision=fp64).

    Raises:
        RunnerError: The set is missing, can't be read, or its columns are not clear.
    """
    tables = load_tables(path, subset, data_files, split)
    known, setting = dict(like or {}), f"data.path={path}"
    wanted: dict[str, Any] = {"inputs": inputs, "target": target, "kind": kind}
    columns = choose_columns(
        tables["train"].features, **{name: known.get(name, value) for name, value in wanted.items()}
    )
    mode, sides, dtype = known.get("mode", mode), sides_of(known.get("size", size)), known.get("dtype", dtype)
    tokens = None
    if columns.form == TEXT:
        length = known.get("context_length", context_length)
        entries = known["entries"] if known else entries_of(tokenizer)
        # one more in a language, for what follows the last token
        tokens = TextRows(entries, length + (columns.target is None), setting=f"data.tokenizer={tokenizer}")
        if columns.target is None:
            tables = _without_empty(tables, columns, setting)
    elif columns.form == IMAGE and sides is None:
        part = tables["train"].select_columns(list(columns.inputs)).with_format("arrow")[:]
        images = _encoded_images(part, columns.inputs[0])
        sides = same_size(images, _row_names(range(len(images))), None, setting=setting)
    reading = Reading(columns, setting, mode, sides, tokens, dtype)
    shape = reading.row_shape(tables["train"])
    number_bytes = {IMAGE: 1, TEXT: 8}.get(columns.form, np.dtype(dtype).itemsize)
    once, reason = is_decoded_once(decode, num_bytes=sum(map(len, tables.values())) * math.prod(shape) * number_bytes)
    targets, classes = _all_targets(tables, reading, classes=tuple(known.get("classes", ())))
    is_guessed = kind == "auto" and not (known or columns.names)
    if is_guessed and classes and all(re.match(LIKE_A_DATE, one) for one in classes):
        raise RunnerError(holds_dates(str(columns.target), setting=f"data.target={columns.target}"))
    notes: tuple[str, ...] = ()
    rows, marks = {}, []
    for name in targets:
        rows[name], mark = _rows(tables[name], reading, targets[name], once=once)
        marks.append(mark)
    if tokens is not None and (cut := tokens.what_was_cut()):
        notes = (f"{cut}; a larger data.context_length takes more of them",)
    source = Source(
        subset or path,
        rows.pop("train"),
        _facts(shape, targets["train"], classes, tokens),
        labels=targets["train"] if classes else None,
        given=rows,
        origin=f"{path} (datasets): {len(tables['train']):,} rows, {reason}",
        classes=classes,
        around=normalised if columns.form == IMAGE else None,
        told=f"{shape} {marks}",
        notes=notes,
        reader=reading.node(classes),
    )
    return augmented(source, augment)


def read_rows(
    path: Any,
    *,
    form: str,
    inputs: Sequence[str],
    target: str | None,
    kind: str,
    classes: Sequence[str] = (),
    size: Sequence[int] | None = None,
    mode: str = "rgb",
    entries: str | None = None,
    context_length: int | None = None,
    dtype: str = "float32",
) -> Iterator[Tensor]:
    """Yield the inputs of a file for predictions, (n, ...), block by block. The other arguments are the run's.

    Args:
        path: csv, tsv, json, jsonl, parquet or arrow with the columns `inputs`; for one text also txt, a text per line;
            for images see read_images().

    Raises:
        RunnerError: The file is missing, can't be read or lacks a column.
    """
    if form == IMAGE:
        yield from read_images(path, size=size or (), mode=mode)
        return
    table, columns = load_tables(str(path))["train"], tuple(inputs)
    there = list(table.column_names)
    if len(columns) == 1 and there == ["text"]:  # a .txt has one column, of that name
        columns = ("text",)
    if missing := [name for name in columns if name not in there]:
        hits = nearest(missing[0], there)
        fix = f"add a column `{missing[0]}`" + (f", or rename `{hits[0]}`" if hits else "")
        shown = described({name: form_of(table.features[name]) for name in there})
        problem = f"the file has no column {', '.join(missing)}, which the model was trained on; it has {shown}"
        raise RunnerError.of(f"the file {path}", problem, fix)
    tokens = None if context_length is None else TextRows(entries, context_length)
    reading = Reading(HubColumns(form, columns, target, kind), f"the file {path}", tokens=tokens, dtype=dtype)
    rows = table.with_format("arrow")
    for start in range(0, len(rows), BLOCK):
        yield reading.inputs(rows[start : start + BLOCK])
    if tokens is not None and (cut := tokens.what_was_cut()):
        log.warning("%s, as in the training", cut)


@dataclass(frozen=True)
class Reading:
    """How a table's columns become inputs. Worker processes get a copy."""

    columns: HubColumns
    setting: str
    mode: str = "rgb"  # of images
    size: tuple[int, int] | None = None  # of images
    tokens: TextRows | None = None  # of texts
    dtype: str = "float32"  # of numbers; float64 with train.precision=fp64

    def inputs(self, part: Any, rows: Sequence[int] | None = None) -> Tensor:
        """Return (B, ...) from a pyarrow table. Raises: RunnerError for values that are missing or can't be read.

        rows: a batch's, which a worker process reads by one thread; None for the whole table.
        """
        if self.tokens is not None:
            texts = zip(*(part.column(name).to_pylist() for name in self.columns.inputs), strict=True)
            return self.tokens.encode([BETWEEN.join(text or "" for text in row) for row in texts])
        if self.columns.form == IMAGE:
            images = _encoded_images(part, self.columns.inputs[0])
            names, threads = _row_names(range(len(images)) if rows is None else rows), None if rows is None else 1
            how: dict[str, Any] = {"mode": self.mode, "size": self.size, "setting": self.setting}
            return decoded_at_once(images, names, **how, num_threads=threads)
        called = Called(self.setting, f"the columns {', '.join(self.columns.inputs)}")
        return to_floats(self.numbers(part), called, dtype=getattr(torch, self.dtype))

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
        if self.columns.form == IMAGE:
            assert self.size is not None
            return [CHANNELS[self.mode], *self.size]
        if self.tokens is not None:
            return [self.tokens.length - (self.columns.target is None)]
        return list(self.numbers(table.with_format("arrow")[:1]).shape[1:])

    def node(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return the node of the reader of further files."""
        columns, tokens = self.columns, self.tokens
        node: dict[str, Any] = {"_target_": READER, "_partial_": True, "form": columns.form}
        node |= {"inputs": list(columns.inputs), "target": columns.target, "kind": columns.kind}
        node["classes"] = list(classes)
        if self.size is not None and columns.form == IMAGE:
            node |= {"size": list(self.size), "mode": self.mode}
        if self.dtype != Reading.dtype:
            node["dtype"] = self.dtype
        if tokens is not None:
            node |= {"entries": tokens.entries, "context_length": tokens.length - (columns.target is None)}
        return node


class TableRows(BatchDataset):
    """Rows of a table that stays in its file. The process that needs a batch reads it in one piece."""

    def __init__(self, table: Any, reading: Reading, targets: Tensor | None) -> None:
        self._table, self._reading, self._targets = table, reading, targets

    def __len__(self) -> int:
        return len(self._table)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        targets = None if self._targets is None else self._targets[torch.tensor(indices)]
        return self._reading.batch(self._reading.inputs(self._table[list(indices)], indices), targets)


def _rows(table: Any, reading: Reading, targets: Tensor | None, *, once: bool) -> tuple[Any, str]:
    """Return the rows, and a digest of some of them and of all targets, which is the same wherever they are."""
    table = table.with_format("arrow")
    indices: list[int] = torch.linspace(0, len(table) - 1, min(len(table), FINGERPRINT_ROWS)).round().long().tolist()
    rows: Any
    if once:
        inputs = reading.inputs(table[:])
        rows, some = reading.batch(inputs, targets), inputs[indices]
    else:
        rows, some = TableRows(table, reading, targets), reading.inputs(table[indices], indices)
    digest = hashlib.sha256(some.contiguous().numpy().data)
    if targets is not None:
        digest.update(targets.contiguous().numpy().data)
    return rows, digest.hexdigest()


def _encoded_images(part: Any, column: str) -> list[Encoded]:
    images = (one or {} for one in part.column(column).to_pylist())
    return [one["bytes"] if one.get("bytes") is not None else str(one.get("path") or "") or b"" for one in images]


def _row_names(rows: Sequence[int]) -> list[str]:
    return [f"the image of row {row}" for row in rows]


def _numbers(column: Any, name: str, setting: str) -> Any:
    import pyarrow.compute as compute

    values, count = column.combine_chunks(), len(column)
    while _is_list(values.type):
        if len(compute.unique(compute.list_value_length(values))) != 1:  # a missing one has the length None
            problem = f"the lists in column `{name}` differ in length, or some are missing"
            raise RunnerError.of(setting, problem, "use lists of the same length")
        values = values.flatten()
    return values.cast("float64", safe=False).to_numpy(zero_copy_only=False).reshape(count, -1)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _without_empty(tables: Mapping[str, Any], columns: HubColumns, setting: str) -> dict[str, Any]:
    texts = {}
    for name, table in tables.items():
        rows = zip(*(table[column] for column in columns.inputs), strict=True)
        full = [index for index, row in enumerate(rows) if any(row)]
        texts[name] = table if len(full) == len(table) else table.select(full)
    if not len(texts["train"]):
        raise RunnerError.of(setting, "the files contain no text", "use files with text")
    return texts


def _all_targets(
    tables: Mapping[str, Any], reading: Reading, *, classes: tuple[str, ...]
) -> tuple[dict[str, Tensor | None], tuple[str, ...]]:
    """Return the targets by split, and the classes: an earlier run's, the column's own, or the training split's.

    A split whose classes are all hidden (-1), as in competitions, is left out.
    """
    columns, setting, dtype = reading.columns, reading.setting, getattr(torch, reading.dtype)
    if columns.target is None:
        return dict.fromkeys(tables), ()
    targets: dict[str, Tensor | None] = {}
    for name, table in tables.items():  # train comes first
        values = _target_values(table, columns.target, setting)
        called = f"column {columns.target} of {name}"
        if columns.names and columns.kind != "regression":
            if name != "train" and (values == -1).all():
                continue
            if values.min() < 0 or values.max() >= len(columns.names):
                problem = f"{called} contains {values.min()}..{values.max()}, and has {len(columns.names)} classes"
                raise RunnerError.of(setting, problem, "remove the rows of unknown class (-1)")
            values = np.array(columns.names)[values]
            classes = classes or columns.names
        how: dict[str, Any] = {"kind": columns.kind, "like": classes or None, "dtype": dtype}
        targets[name], names = to_targets(values, Called(setting, called), **how)
        classes = classes or names
    return targets, classes


def _target_values(table: Any, column: str, setting: str) -> Any:  # (N,) or (N, T)
    values = table.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        problem = f"{values.null_count:,} of {len(values):,} rows have no value in column `{column}`"
        raise RunnerError.of(setting, problem, "remove these rows")
    if _is_list(values.type):
        return _numbers(values, column, setting)
    array = values.to_numpy()
    return array.astype(str) if array.dtype.kind == "O" else array


def _facts(
    shape: list[int], targets: Tensor | None, classes: tuple[str, ...], tokens: TextRows | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"input_shape": shape, "num_classes": len(classes) or None}
    if tokens is None:
        facts["in_features"] = math.prod(shape)
    else:
        facts |= {"vocab_size": tokens.vocab_size, "context_length": shape[0], "padding_token": tokens.padding}
    outputs = facts["vocab_size"] if targets is None else len(classes) or math.prod(targets.shape[1:])
    return {**facts, "out_features": outputs}
