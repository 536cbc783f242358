"""Reads inputs for prediction, without targets, from a file with the columns that a model was trained on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from runner.config.checks import choice
from runner.data.hub.columns import IMAGE, Chosen, form_of
from runner.data.hub.load import loaded
from runner.data.hub.rows import Reading, row_shape
from runner.data.language.text_rows import TextRows
from runner.data.vision.dataset import is_decoded_once
from runner.data.vision.decode import CHANNELS, checked_size
from runner.data.vision.reader import read_images
from runner.errors import RunnerError, nearest

log = logging.getLogger("runner")

#: rows in a block, where all of them do not fit into memory
BLOCK = 4096


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
    offsets: Sequence[float] = (),
) -> Tensor | Iterator[Tensor]:
    """The inputs, (N, ...), or blocks of them where all together are too big for memory.

    path: csv, tsv, json, jsonl, parquet or arrow with the columns `inputs`; of one text also txt, a text in each line; of
    images what runner.data.vision.reader takes. The other values are the run's. Raises: RunnerError for a file that is
    not there, can't be read or lacks a column.
    """
    if form == IMAGE:
        assert size is not None
        return read_images(path, size=size, mode=mode)
    table = loaded(str(path))["train"]
    columns = tuple(inputs)
    if len(columns) == 1 and list(table.column_names) == ["text"]:  # a .txt has one column, of that name
        columns = ("text",)
    _check_columns(table, columns, path)
    tokens = None if context_length is None else TextRows(entries, context_length)
    picked = Chosen(form, columns, target or "", kind, tuple(classes))
    reading = Reading(
        picked, f"the file {path}", choice(mode, CHANNELS, key="data.mode"), checked_size(size), tokens, tuple(offsets)
    )
    rows = table.with_format("arrow")
    once, _ = is_decoded_once("auto", num_bytes=len(rows) * 8 * math.prod(row_shape(table, reading)))
    if once:
        found = reading.inputs(rows[:])
        _tell_cut(tokens)
        return found
    return _blocks(rows, reading)


def _blocks(rows: Any, reading: Reading) -> Iterator[Tensor]:
    for start in range(0, len(rows), BLOCK):
        yield reading.inputs(rows[start : start + BLOCK])
    _tell_cut(reading.tokens)


def _tell_cut(tokens: TextRows | None) -> None:
    if tokens is not None and (cut := tokens.what_was_cut()):
        log.warning("%s, as in the training", cut)


def _check_columns(table: Any, columns: Sequence[str], path: Any) -> None:
    there = list(table.column_names)
    if missing := [name for name in columns if name not in there]:
        told = ", ".join(f"{name} ({form_of(table.features[name])})" for name in there)
        hits = nearest(missing[0], there)
        fix = f"add a column `{missing[0]}`" + (f", or rename `{hits[0]}`" if hits else "")
        problem = f"the file has no column {', '.join(missing)}, which the model was trained on; it has {told}"
        raise RunnerError.of(f"the file {path}", problem, fix)
