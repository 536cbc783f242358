"""Makes a Source of table files (CSV, TSV, Parquet, Feather): rows of float32, and classes or numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from runner.data.source import Source
from runner.data.tables.columns import Table, choose, from_reader, table_of
from runner.data.tables.encoder import Encoder, tidied_batches
from runner.data.tables.files import TableFile, shared_names, table_files
from runner.data.tables.forms import Form, form_of
from runner.data.tables.node import reader_node
from runner.data.tables.reader import TableReader, report_unknown
from runner.data.tables.rows import MappedRows, cache_key, fits_in_memory, gathered, mapped, remembered_plan
from runner.data.tables.statistics import fit
from runner.errors import RunnerError


def table(
    path: str | Sequence[str],
    target: str | Sequence[str] | None = None,
    *,
    kind: str = "auto",
    columns: Sequence[str] | None = None,
    drop: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    val_path: str | None = None,
    test_path: str | None = None,
    missing: str = "mean",
    normalize: bool = True,
    scale_targets: bool = True,
    max_categories: int = 100,
    decimal: str = ".",
    header: bool = True,
    date_format: str | Sequence[str] | None = None,
    missing_values: Sequence[str | float] | None = None,
    drop_missing_targets: bool = False,
    in_memory: str | bool = "auto",
    like: Mapping[str, Any] | TableReader | None = None,
) -> Source:
    """Rows of a table: numbers, texts, true and false, dates, with or without missing values; the first line has the names.

    A column of texts is a category, its max_categories most frequent ones each a 0/1 column of the model's inputs, others
    all zeros; so are numbers in `categorical`. A column of few numbers stays one, since its order tells something. A column
    of texts that nearly all differ (names, keys) is left out, if nobody asked for it in columns or categorical. true and
    false are 1 and 0. A date, as ISO 8601 writes it, is the days since 1970, its month and weekday as categories and, where
    there are times, the hour; zones are told from universal time. Missing numbers become the mean of the training split;
    each column that has any gets a 0/1 column for it, which also says it of categories.

    The host keeps the values as they are, (N, floats), NaN for missing and a number for a category: a layer before the
    model scales and spreads them out, fitted on the training split alone, and goes with it wherever it goes. Its width is
    facts.in_features. From numbers with more digits than float32 has, times for one, their mean is taken before, by the
    reader, too. Of a regression, a layer behind the model scales outputs back: losses are told in the target's own unit,
    and learnt in its spread.

    missing_values are texts and numbers that mark a missing value, in addition to empty values, NA and the like.
    Texts like $1,234.50 are numbers, too. decimal="," is for numbers like 3,5 and 1.234,50; header=False for files that
    begin with a row, whose columns are then called c0, c1 and so on; date_format, as strptime's or a list of them, for
    dates and times that ISO 8601 does not write so. drop_missing_targets leaves rows without a target out.

    target: None for the last column. kind: auto takes texts, true and false and up to 100 different whole numbers as
    classes, all other numbers as a regression; several columns as labels, where all are 0 and 1. like: the reader of an
    earlier run, whose columns, categories and classes hold. in_memory: see runner.data.tables.rows; auto goes by the memory
    that is free, and what it does not take is read from a file in the cache, row by row.
    The file is read twice, a few MiB at a time. Raises: RunnerError with file, line and column for what is wrong in it.
    """
    form = form_of(decimal, header, date_format, missing_values)
    files = table_files(path, key="data.path", form=form)
    how: dict[str, Any] = {"target": target, "kind": kind, "columns": columns, "drop": drop, "categorical": categorical}
    how |= {"missing": missing, "max_categories": max_categories, "drop_missing_targets": drop_missing_targets}
    if like is not None:
        how = {"like": _node(like)}
    key = cache_key(files, how | form.node() | {"complete": drop_missing_targets})
    remembered = remembered_plan(key) if in_memory is not True else None
    if remembered is not None:
        found = table_of(remembered)
    else:
        found = from_reader(how["like"]) if like is not None else choose(files, shared_names(files), **how)
    rows, where = _rows(files, found, in_memory, key, complete=drop_missing_targets)
    others = {name: file for name, file in (("val", val_path), ("test", test_path)) if file is not None}
    scales = scale_targets and found.target.kind == "regression"
    return Source(
        files[0].path.stem,
        rows,
        _facts(found),
        labels=_labels(rows, found),
        given={
            name: _given(f"data.{name}_path", file, found, in_memory, form=form, complete=drop_missing_targets)
            for name, file in others.items()
        },
        origin=f"{path} ({'; '.join([*found.notes, where])})",
        notes=found.notes,
        classes=found.target.classes,
        targets=() if found.target.classes else found.target.names,
        around=partial(
            fit,
            sizes=found.columns.sizes,
            flagged=found.columns.flagged,
            normalize=normalize,
            scale_targets=scales,
        ),
        reader=reader_node(found.columns, found.target, form),
        columns=tuple(column.name for column in found.columns.columns for _ in column.sizes),
        place=partial(_place, files, found.target.names, complete=drop_missing_targets),
    )


def _rows(files: Sequence[TableFile], found: Table, asked: str | bool, key: str, *, complete: bool) -> tuple[Any, str]:
    target_floats = 2 if found.target.classes else len(found.target.names)  # a class is one int64
    row_bytes = 4 * (found.columns.num_floats + target_floats)
    known = found.num_rows
    size = known * row_bytes if known is not None else sum(file.num_bytes(found.columns.num_floats) for file in files)
    fits, why = fits_in_memory(size, asked)
    if fits:
        rows = gathered(_chunks(files, found, complete=complete), num_rows=known, num_floats=found.columns.num_floats)
        if not len(rows[0]):
            raise RunnerError.of(
                files[0].asked, f"`{files[0].path.name}` has no rows", "use a file with rows below the column names"
            )
        return rows, f"in memory ({why})"
    plan = found.node()
    mapped_rows = mapped(
        key, lambda: _chunks(files, found, complete=complete), plan=plan, num_bytes=size, asked=files[0].asked
    )
    return mapped_rows, f"mapped from {mapped_rows.folder} ({why})"


def _place(files: Sequence[TableFile], targets: Sequence[str], row: int, *, complete: bool) -> str:
    for tidied, place, _ in tidied_batches(files, targets, targets if complete else ()):
        num_rows = len(next(iter(tidied.values())))
        if row < num_rows:
            return place.of(row)
        row -= num_rows
    return ""


def _chunks(files: Sequence[TableFile], found: Table, *, complete: bool) -> Iterator[tuple[Any, Any]]:
    encoder = Encoder(found.columns)
    for rows, targets, place in encoder.chunks(files, found.target.names, complete=complete):
        yield rows, found.target.encode(targets, place)
    if not found.is_cut:  # else the rare categories are unknown in training, too
        report_unknown(encoder)


def _given(key: str, path: str, found: Table, asked: str | bool, *, form: Form, complete: bool) -> Any:
    files = table_files(path, key=key, form=form)
    other = replace(found, num_rows=None)
    how = found.node() | form.node() | {"complete": complete}
    return _rows(files, other, asked, cache_key(files, how), complete=complete)[0]


def _facts(found: Table) -> dict[str, Any]:
    width, num_classes = found.columns.width, len(found.target.classes) or None
    sizes = {"input_shape": [width], "in_features": width, "num_classes": num_classes}
    return {**sizes, "out_features": found.target.num_outputs, "is_multilabel": found.target.kind == "multilabel"}


def _labels(rows: Any, found: Table) -> Tensor | None:
    if not found.target.classes:
        return None
    labels: Tensor = rows.targets_in_memory() if isinstance(rows, MappedRows) else rows[1]
    return labels


def _node(like: Mapping[str, Any] | TableReader) -> dict[str, Any]:
    return reader_node(like.columns, like.target, like.form) if isinstance(like, TableReader) else dict(like)
