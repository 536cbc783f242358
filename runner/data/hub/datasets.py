"""Makes a Source of a set of Hugging Face's `datasets` library (numbers, images or texts); reads such files for predictions."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from runner.config.checks import choice
from runner.data.hub.load import IMAGE, NUMBER, TEXT, Chosen, Files, chosen, form_of, loaded
from runner.data.hub.rows import (
    Reading,
    TableRows,
    fingerprint_of_all,
    image_size,
    offsets_in,
    row_shape,
    target_values,
)
from runner.data.language.vocabulary import TextRows, entries_of
from runner.data.source import Source
from runner.data.tables.cells import LIKE_A_DATE
from runner.data.tables.choose import MOST_HINTS, holds_dates
from runner.data.tables.scan import offset_note
from runner.data.tables.values import fall_together, to_targets
from runner.data.vision.augment import augmented
from runner.data.vision.dataset import CHANNELS, checked_size, is_decoded_once
from runner.data.vision.images import normalised, read_images
from runner.errors import RunnerError, nearest

log = logging.getLogger("runner")

READER = "runner.data.read_rows"
#: rows of a prediction's block, where all of them do not fit into memory
BLOCK = 4096


def huggingface(
    path: str,
    subset: str | None = None,
    *,
    split: Mapping[str, str] | None = None,
    data_files: Files | None = None,
    data_dir: str | None = None,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    kind: str = "auto",
    size: int | Sequence[int] | None = None,
    mode: str = "rgb",
    tokenizer: str = "bytes",
    context_length: int = 256,
    decode: str = "auto",
    streaming: bool = False,
    num_rows: int | None = None,
    augment: Mapping[str, Any] | Sequence[Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Source:
    """Return rows of float32 numbers (F,), of images (C, H, W) uint8 or of tokens (T,) int64.

    Args:
        path: A set of the Hub; or csv, json, parquet, arrow, text or imagefolder, with data_files or data_dir; or a file
            or directory.
        subset: The configuration of a set of the Hub.
        split: {train: ..., val: ..., test: ...} by the set's own names (None: found).
        data_files: Files, by split if they have several.
        data_dir: A directory of files.
        inputs: Columns (None: found by name and type); several texts are joined by line breaks.
        target: A column (None: found).
        kind: classification, regression, language (no target: the tokens that follow), or auto (by the target's column).
        size, mode, augment: Of images, as for data=images.
        decode: Whether rows are read once into memory, or batch by batch from the mapped file.
        tokenizer: bytes or a tokenizer.json; rows are cut and padded to context_length tokens.
        streaming: Fetches only the first num_rows rows of each split, in the stream's order, and keeps them in memory.
        like: The reader of an earlier run, whose columns, classes and tokens hold.

    Raises:
        RunnerError: The set is missing, can't be read, or its columns are not clear.
    """
    known: dict[str, Any] = dict(like or {})
    tables = loaded(
        path, subset, split=split, data_files=data_files, data_dir=data_dir, streaming=streaming, num_rows=num_rows
    )
    asked = f"data.path={path}"
    picked = chosen(
        tables["train"].features,
        inputs=known.get("inputs", inputs),
        target=known.get("target", target),
        kind=known.get("kind", kind),
    )
    reading = Reading(
        picked, asked, choice(known.get("mode", mode), CHANNELS, key="data.mode"), checked_size(known.get("size", size))
    )
    if picked.form == TEXT:
        reading = replace(reading, tokens=_tokens(picked, tokenizer, context_length, known))
        tables = _without_empty(tables, picked, asked)
    elif picked.form == IMAGE and reading.size is None:
        reading = replace(reading, size=image_size(tables["train"], picked.inputs[0], asked=asked))
    shape = row_shape(tables["train"], reading)
    notes: tuple[str, ...] = ()
    if picked.form == NUMBER:
        reading, notes = _centred(reading, tables["train"], math.prod(shape), known)
    width = {IMAGE: 1, TEXT: 8}.get(picked.form, 4)  # bytes of a number
    num_bytes = sum(map(len, tables.values())) * math.prod(shape) * width
    once, reason = is_decoded_once(decode, num_bytes=num_bytes)
    targets, classes, of_target = _all_targets(tables, picked, asked, classes=tuple(known.get("classes", ())))
    if (
        kind == "auto"
        and classes
        and not (known or picked.names)
        and all(re.match(LIKE_A_DATE, each) for each in classes)
    ):
        raise RunnerError(holds_dates(str(picked.target), asked=f"data.target={picked.target}"))
    read = {name: _rows(tables[name], reading, targets[name], once=once) for name in tables if name in targets}
    rows = {name: some for name, (some, _) in read.items()}
    source = Source(
        subset or path,
        rows.pop("train"),
        _facts(shape, targets["train"], classes, reading),
        labels=targets["train"] if classes else None,
        given=rows,
        origin=f"{path} (datasets): {len(tables['train']):,} rows, {reason}",
        classes=classes,
        around=normalised if picked.form == IMAGE else None,
        told=f"{shape} {[mark for _, mark in read.values()]}",
        notes=(*notes, *of_target, *_on_length(reading)),
        reader=_reader(reading, classes),
    )
    return augmented(source, augment)


def _tokens(picked: Chosen, tokenizer: str, context_length: int, known: Mapping[str, Any]) -> TextRows:
    if type(context_length) is not int or context_length < 1:
        problem = "`data.context_length` must be a whole number of tokens, 1 or more"
        raise RunnerError.suggest(f"data.context_length={context_length}", problem, ["data.context_length=256"])
    entries = known["entries"] if known else entries_of(tokenizer)
    length = known.get("context_length", context_length) + (
        picked.target is None
    )  # one more, for what follows the last
    return TextRows(entries, length, asked=f"data.tokenizer={tokenizer}")


def _centred(reading: Reading, train: Any, width: int, known: Mapping[str, Any]) -> tuple[Reading, tuple[str, ...]]:
    if known:
        return replace(reading, offsets=tuple(known.get("offsets", ()))), ()
    found = offsets_in(train, reading, width=width)
    notes = [offset_note(name, offset) for name, offset in found if offset]
    if not notes:
        return reading, ()
    return replace(reading, offsets=tuple(offset for _, offset in found)), tuple(notes[:MOST_HINTS])


def _on_length(reading: Reading) -> tuple[str, ...]:
    cut = "" if reading.tokens is None else reading.tokens.what_was_cut()
    return (f"{cut}; a larger data.context_length takes more of them",) if cut else ()


def _without_empty(tables: dict[str, Any], picked: Chosen, asked: str) -> dict[str, Any]:
    if picked.target is not None:
        return tables
    found = {}
    for name, table in tables.items():
        parts = [table[column] for column in picked.inputs]
        full = [index for index, texts in enumerate(zip(*parts, strict=True)) if any(text for text in texts)]
        found[name] = table if len(full) == len(table) else table.select(full)
    if not len(found["train"]):
        raise RunnerError.of(asked, "the files contain no text", "use files with text")
    return found


def _all_targets(
    tables: Mapping[str, Any], picked: Chosen, asked: str, *, classes: tuple[str, ...]
) -> tuple[dict[str, Tensor | None], tuple[str, ...], tuple[str, ...]]:
    """By split; the classes: those of an earlier run, or the column's own, or those of the training split; what is said of it.

    A split whose classes are all hidden (-1), as in test splits of competitions, is left out.
    """
    if picked.target is None:
        return dict.fromkeys(tables), (), ()
    made: dict[str, Tensor | None] = {}
    notes: tuple[str, ...] = ()
    for name, table in tables.items():  # train comes first
        values = target_values(table, picked.target, asked=asked)
        called = f"column {picked.target} of {name}"
        if picked.names and picked.kind != "regression":
            if name != "train" and (values == -1).all():
                continue
            values = _named(values, picked.names, asked=asked, called=called)
            classes = classes or picked.names
        made[name], names = to_targets(values, asked=asked, called=called, kind=picked.kind, like=classes or None)
        classes = classes or names
        if name == "train" and not classes:
            notes = fall_together(values, called=f"column {picked.target}")
    return made, classes, notes


def _named(numbers: Any, names: tuple[str, ...], *, asked: str, called: str) -> Any:
    if numbers.min() < 0 or numbers.max() >= len(names):
        problem = f"{called} contains {numbers.min()}..{numbers.max()}, and has {len(names)} classes"
        raise RunnerError.of(asked, problem, "remove the rows of unknown class (-1)")
    return np.array(names)[numbers]


def _rows(table: Any, reading: Reading, targets: Tensor | None, *, once: bool) -> tuple[Any, str]:
    if once:
        inputs = reading.inputs(table.with_format("arrow")[:])
        return reading.batch(inputs, targets), fingerprint_of_all(inputs, targets)
    rows = TableRows(table, reading, targets)
    return rows, rows.fingerprint


def _facts(shape: list[int], targets: Tensor | None, classes: tuple[str, ...], reading: Reading) -> dict[str, Any]:
    facts: dict[str, Any] = {"input_shape": shape, "num_classes": len(classes) or None}
    if reading.tokens is not None:
        facts |= {"vocab_size": reading.tokens.vocab_size, "context_length": shape[0]}
        facts["padding_token"] = reading.tokens.padding
    else:
        facts["in_features"] = math.prod(shape)
    if targets is None:
        return {**facts, "out_features": facts["vocab_size"]}
    return {**facts, "out_features": len(classes) or math.prod(targets.shape[1:])}


def _reader(reading: Reading, classes: Sequence[str]) -> dict[str, Any]:
    picked = reading.chosen
    node: dict[str, Any] = {
        "_target_": READER,
        "_partial_": True,
        "form": picked.form,
        "inputs": list(picked.inputs),
        "target": picked.target,
        "kind": picked.kind,
        "classes": list(classes),
    }
    if picked.form == IMAGE:
        assert reading.size is not None
        node |= {"size": list(reading.size), "mode": reading.mode}
    if reading.offsets:
        node["offsets"] = list(reading.offsets)
    if reading.tokens is not None:
        length = reading.tokens.length - (picked.target is None)
        node |= {"entries": reading.tokens.entries, "context_length": length}
    return node


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
    """Return the inputs of a file for predictions, (N, ...), or an iterator of blocks if memory is too small for them.

    Args:
        path: csv, tsv, json, jsonl, parquet or arrow with the columns `inputs`; for one text also txt, a text per line;
            for images see read_images(). The other arguments are the run's.

    Raises:
        RunnerError: The file is missing, can't be read or lacks a column.
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
        _warn_of_cut_texts(tokens)
        return found
    return _row_blocks(rows, reading)


def _row_blocks(rows: Any, reading: Reading) -> Iterator[Tensor]:
    for start in range(0, len(rows), BLOCK):
        yield reading.inputs(rows[start : start + BLOCK])
    _warn_of_cut_texts(reading.tokens)


def _warn_of_cut_texts(tokens: TextRows | None) -> None:
    if tokens is not None and (cut := tokens.what_was_cut()):
        log.warning("%s, as in the training", cut)


def _check_columns(table: Any, columns: Sequence[str], path: Any) -> None:
    there = list(table.column_names)
    if missing := [name for name in columns if name not in there]:
        forms = ", ".join(f"{name} ({form_of(table.features[name])})" for name in there)
        hits = nearest(missing[0], there)
        fix = f"add a column `{missing[0]}`" + (f", or rename `{hits[0]}`" if hits else "")
        problem = f"the file has no column {', '.join(missing)}, which the model was trained on; it has {forms}"
        raise RunnerError.of(f"the file {path}", problem, fix)
