"""Makes a Source of table files (CSV, TSV, Parquet, Feather), and reads further files like them for predictions.

Rows are tensors in memory, or a cached file that is memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.checks import Count, one_of
from runner.data.conversion import BatchDataset
from runner.data.source import Preprocessing, Source
from runner.data.tables.cells import DateFormat, Decimal, Header, MissingValues, form_of
from runner.data.tables.choose import ChosenColumns, ColumnSettings, choose, from_reader
from runner.data.tables.encoder import AnyTable, Encoder, encode_target, parts_of, reader_node, tidy_batches
from runner.data.tables.files import TableFile, TableFrame, shared_names, table_files
from runner.data.tables.scan import Moments
from runner.device.host_memory import fits_in_memory
from runner.errors import RunnerError

#: the variable that names the directory for large tables' rows (default: ~/.cache/runner)
CACHE_VARIABLE = "RUNNER_CACHE"
#: of the cache's files; increase it when rows are encoded differently
FORMAT = 3
INPUTS, TARGETS, SIZES = "inputs.f32", "targets.npy", "sizes.json"
Chunks = Iterator[tuple[Any, Any]]  # (n, F) floats and (n,) int64 or (n, T) floats


class MappedRows(BatchDataset):
    """Rows in a memory-mapped file: (F,) floats, and a class or (T,) floats. A worker process opens the file itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sizes = json.loads((folder / SIZES).read_text())
        self.fingerprint: str = sizes["fingerprint"]
        self._shape, self._dtype = (sizes["num_rows"], sizes["num_floats"]), sizes["dtype"]
        self._maps: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return int(self._shape[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = np.asarray(indices)
        inputs, targets = self._arrays()
        return torch.from_numpy(inputs[chosen]), torch.from_numpy(targets[chosen])

    def mapped_tensors(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets as tensors over the mapped file, of which only the parts in use are read."""
        inputs, targets = self._arrays()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, for memory that is read-only
            return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _arrays(self) -> tuple[Any, Any]:
        if self._maps is None:
            inputs = np.memmap(self.folder / INPUTS, self._dtype, mode="r", shape=self._shape)  # "c" counts as memory
            self._maps = inputs, np.load(self.folder / TARGETS, mmap_mode="r")
        return self._maps

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}  # NumPy would pickle the whole file


def gathered(chunks: Chunks, *, num_rows: int | None = None, num_floats: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Return the rows as tensors. With num_rows, memory is allocated once."""
    inputs = np.empty((num_rows or 0, num_floats), dtype)
    parts: list[Any] = [inputs[:0]]
    targets: list[Any] = []
    filled = 0
    for rows, some in chunks:
        if num_rows is None:
            parts.append(rows)
        else:
            inputs[filled : filled + len(rows)] = rows
        filled += len(rows)
        targets.append(some)
    inputs = np.concatenate(parts) if num_rows is None else inputs
    return torch.from_numpy(inputs), torch.from_numpy(np.concatenate(targets)) if targets else torch.empty(0)


def mapped(key: str, make: Callable[[], Chunks], *, plan: dict[str, Any], num_bytes: int, setting: str) -> MappedRows:
    """Return the rows in a file of the cache. The first process that needs them writes it, the others wait.

    key: a name for the rows' files and settings. plan: what remembered_plan() returns from then on. Raises: RunnerError.
    """
    from filelock import FileLock

    folder = cache() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{key}.lock")):
            if not (folder / SIZES).is_file():
                free = shutil.disk_usage(folder.parent).free
                if num_bytes > free:
                    raise OSError(f"they take {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
                _write(folder, make(), plan)
    except OSError as error:
        problem = f"the table doesn't fit into memory, and its rows can't be written to {folder.parent}: {error}"
        fix = f"set `{CACHE_VARIABLE}` to a directory on a disk with free space"
        raise RunnerError.of(setting, problem, fix) from error
    return MappedRows(folder)


def remembered_plan(key: str) -> dict[str, Any] | None:
    """Return the plan of cached rows, if there are any."""
    try:
        plan: dict[str, Any] = json.loads((cache() / key / SIZES).read_text())["plan"]
    except OSError:
        return None
    return plan


def cache_key(files: Sequence[TableFile], how: Mapping[str, Any]) -> str:
    """Return a name for the rows of these files as they are now, read with the settings `how`."""
    states = [(str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps([FORMAT, states, how], default=list).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', files[0].path.stem)[:40]}-{digest[:24]}"


def cache() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "runner").expanduser() / "tables"


def _write(folder: Path, chunks: Chunks, plan: dict[str, Any]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        digest, num_rows, num_floats, dtype, targets = hashlib.sha256(), 0, 0, "", []
        with (part / INPUTS).open("wb") as file:
            for rows, some in chunks:
                file.write(rows.data)
                digest.update(rows.data)
                digest.update(np.ascontiguousarray(some).data)
                num_rows, num_floats, dtype = num_rows + len(rows), rows.shape[1], str(rows.dtype)
                targets.append(some)
        np.save(part / TARGETS, np.concatenate(targets))
        shape = {"num_rows": num_rows, "num_floats": num_floats, "dtype": dtype}
        sizes = {**shape, "fingerprint": digest.hexdigest(), "plan": plan}
        (part / SIZES).write_text(json.dumps(sizes))
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


COLUMNS, SCALED = "runner.models.TableColumns", "runner.models.Scaled"
#: numbers read at a time; what is computed of them takes ten times as much memory
CHUNK_FLOATS = 2**18
FIX = "use a file like the one that the run was trained on"

log = logging.getLogger("runner")


def table(
    path: str | Sequence[str],
    target: str | Sequence[str] | None = None,
    *,
    kind: Annotated[str, one_of(("auto", "classification", "regression", "multilabel"))] = "auto",
    columns: Sequence[str] | None = None,
    drop: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    val_path: str | None = None,
    test_path: str | None = None,
    missing: Annotated[str, one_of(("mean", "refuse"))] = "mean",
    normalize: bool = True,
    scale_targets: bool = True,
    max_categories: Count = 100,
    decimal: Decimal = ".",
    header: Header = True,
    date_format: DateFormat | None = None,
    missing_values: MissingValues | None = None,
    drop_missing_targets: bool = False,
    in_memory: Annotated[str | bool, one_of(("auto", True, False))] = "auto",
    like: Mapping[str, Any] | TableReader | None = None,
    dtype: str = "float32",
) -> Source:
    """Return the rows of a table: numbers, texts, booleans and dates, with or without missing values.

    A column of texts is a category: each of its max_categories most frequent ones is a 0/1 column of the model's inputs,
    and the others are all zeros. A column of texts that nearly all differ (names, keys) is left out, unless `columns`
    or `categorical` names it. A date (ISO 8601, in UTC if it has a zone) is the days since 1970, its month and weekday as
    categories and, if there are times, the hour. Missing numbers become the mean of the training split; each column that
    has any gets a 0/1 column for it.

    The host keeps the values as they are, (N, floats), NaN for missing and a code for a category. A layer in front of the
    model, fitted on the training split and part of the model, scales and encodes them; its width is facts.in_features. The
    mean of numbers with more digits than float32 has is subtracted before. A layer behind a regression's model scales its
    outputs back. The file is read twice, a few MiB at a time. The arguments are explained in conf/data/table.yaml.

    Raises:
        RunnerError: The file or a setting is not valid; with file, line and column.
    """
    form = form_of(decimal, header, date_format, missing_values)
    files = table_files(path, key="data.path", form=form)
    settings = ColumnSettings(
        target, kind, columns, drop, categorical, missing, max_categories, drop_missing_targets, dtype
    )
    if isinstance(like, TableReader):
        like = reader_node(like.columns, like.target, like.form)
    how = asdict(settings) if like is None else {"like": dict(like)}
    form_settings = form.node() | {"complete": drop_missing_targets}
    key = cache_key(files, how | form_settings)
    if in_memory is not True and (plan := remembered_plan(key)) is not None:
        chosen = from_reader(**plan)
    else:
        chosen = choose(files, shared_names(files), settings) if like is None else from_reader(like)
    read = partial(_rows, in_memory=in_memory, complete=drop_missing_targets)
    rows, reason = read(files, chosen, key=key)
    given = {}
    for name, other in (("val", val_path), ("test", test_path)):
        if other is not None:
            others = table_files(other, key=f"data.{name}_path", form=form)
            other_key = cache_key(others, chosen.node() | form_settings)
            given[name], _ = read(others, replace(chosen, num_rows=None), key=other_key)
    classes, is_regression = chosen.target.classes, chosen.target.kind == "regression"
    labels = None
    if classes:
        labels = rows[1] if isinstance(rows, tuple) else rows.mapped_tensors()[1].clone()
    scaled = {"normalize": normalize, "scale_targets": scale_targets and is_regression}
    return Source(
        files[0].path.stem,
        rows,
        {
            "input_shape": [chosen.columns.width],
            "in_features": chosen.columns.width,
            "num_classes": len(classes) or None,
            "out_features": chosen.target.num_outputs,
            "is_multilabel": chosen.target.kind == "multilabel",
        },
        labels=labels,
        given=given,
        origin=f"{path} ({'; '.join([*chosen.notes, reason])})",
        notes=chosen.notes,
        classes=classes,
        targets=() if classes else chosen.target.names,
        around=partial(fit, sizes=chosen.columns.sizes, flagged=chosen.columns.flagged, **scaled),
        reader=reader_node(chosen.columns, chosen.target, form),
        columns=tuple(column.name for column in chosen.columns.columns for _ in column.sizes),
        place=partial(_place, files, chosen.target.names, complete=drop_missing_targets),
    )


def _rows(
    files: Sequence[TableFile], chosen: ChosenColumns, *, in_memory: str | bool, key: str, complete: bool
) -> tuple[Any, str]:
    num_floats, num_rows, dtype = chosen.columns.num_floats, chosen.num_rows, chosen.columns.dtype
    size = np.dtype(dtype).itemsize
    target_floats = 2 if chosen.target.classes else len(chosen.target.names)  # a class is one int64
    known_bytes = num_rows and num_rows * size * (num_floats + target_floats)
    num_bytes = known_bytes or sum(file.max_bytes(num_floats) for file in files) * size // 4
    fits, reason = (in_memory, "as asked") if in_memory != "auto" else fits_in_memory(num_bytes)  # words: ok
    chunks = partial(_chunks, files, chosen, complete=complete)
    if not fits:
        rows = mapped(key, chunks, plan=chosen.node(), num_bytes=num_bytes, setting=files[0].setting)
        return rows, f"mapped from {rows.folder} ({reason})"
    inputs, targets = gathered(chunks(), num_rows=num_rows, num_floats=num_floats, dtype=dtype)
    _check_rows(inputs, files[0].name, files[0].setting)
    return (inputs, targets), f"in memory ({reason})"


def _chunks(files: Sequence[TableFile], chosen: ChosenColumns, *, complete: bool) -> Iterator[tuple[Any, Any]]:
    encoder = Encoder(chosen.columns)
    for rows, targets, place in encoder.chunks(files, chosen.target.names, complete=complete):
        yield rows, encode_target(chosen.target, targets, place, chosen.columns.dtype)
    if not chosen.is_cut:  # rare categories are unknown in training, too
        encoder.warn_of_unknown()


def _check_rows(rows: Tensor, name: str, setting: str) -> None:
    if not len(rows):
        raise RunnerError.of(setting, f"`{name}` has no rows", "use a file with rows below the column names")


def _place(files: Sequence[TableFile], targets: Sequence[str], row: int, *, complete: bool) -> str:
    for values, place, _ in tidy_batches(files, targets, targets if complete else ()):
        num_rows = len(next(iter(values.values())))
        if row < num_rows:
            return place.of(row)
        row -= num_rows
    return ""


def fit(
    train_rows: Any,
    *,
    sizes: Sequence[int],
    flagged: Sequence[int] = (),
    normalize: bool = True,
    scale_targets: bool = False,
) -> Preprocessing:
    """Return the layers around a model: means, spreads and the categories that occur in the training rows."""
    numbers = [index for index, size in enumerate(sizes) if not size]
    known = [np.zeros(size, bool) for size in sizes]
    missing = np.zeros(len(flagged), bool)
    inputs, targets = Moments(len(numbers)), None
    for rows, some in _row_chunks(train_rows, len(sizes)):
        inputs.update(rows[:, numbers])
        missing |= np.isnan(rows[:, list(flagged)]).any(0)
        for index, size in enumerate(sizes):
            if size:
                codes = rows[:, index]
                known[index][codes[codes >= 0].astype(np.int64)] = True
        if scale_targets:
            targets = targets or Moments(some.shape[1])
            targets.update(some)
    before = {
        "_target_": COLUMNS,
        "sizes": list(sizes),
        "means": inputs.mean.tolist() if normalize else [0.0] * len(numbers),
        "spreads": inputs.spread().tolist() if normalize else [1.0] * len(numbers),
        "fills": inputs.mean.tolist(),
        "flagged": list(flagged),
        "seen": np.concatenate([*known, missing]).astype(int).tolist(),
    }
    after = None
    if targets is not None:
        after = {"_target_": SCALED, "means": targets.mean.tolist(), "spreads": targets.spread().tolist()}
    return Preprocessing(before, after, keeps_inputs=False)


def _row_chunks(rows: Any, width: int) -> Iterator[tuple[Any, Any]]:
    step = max(1, CHUNK_FLOATS // max(1, width))
    if isinstance(rows, Dataset):
        starts = range(0, len(rows), step)  # type: ignore[arg-type]
        parts: Iterator[Any] = (rows.__getitems__(range(start, min(start + step, len(rows)))) for start in starts)  # type: ignore[attr-defined, arg-type]
    else:
        parts = zip(*(part.split(step) for part in rows), strict=True)
    for inputs, targets in parts:
        yield inputs.numpy(), targets.numpy()


class TableReader:
    """Read a file's rows as the trained model takes them: reader(path) -> (N, raw floats) on the host.

    The file may have further columns. `unknown` and `missing` count unknown categories and missing values by column.
    """

    def __init__(
        self,
        columns: Sequence[Mapping[str, Any]],
        target: Mapping[str, Any],
        *,
        refuses_missing: bool = False,
        form: Mapping[str, Any] | None = None,
        dtype: str = "float32",
    ) -> None:
        node = {"columns": columns, "target": target, "refuses_missing": refuses_missing, "form": form, "dtype": dtype}
        self.columns, self.target, self.form = parts_of(node)
        self.unknown: dict[str, int] = {}
        self.missing: dict[str, int] = {}

    def __call__(self, path: str, *, key: str = "--input") -> Tensor | Iterator[Tensor]:
        """Return all rows of the file, or an iterator of chunks if memory is too small. Raises: RunnerError."""
        files = table_files(path, key=key, form=self.form)
        fits, _ = fits_in_memory(sum(file.max_bytes(self.columns.num_floats) for file in files))
        if not fits:
            return self._chunks(files)
        rows = self._all(files)
        _check_rows(rows, path, f"{key}={path}")
        return rows

    def frame(self, frame: Any) -> Tensor:
        """Return all rows of a pandas DataFrame, as they are read from a file with the same values."""
        return self._all([TableFrame(frame, "predict(DataFrame)", self.form)])

    def _all(self, files: Sequence[AnyTable]) -> Tensor:
        return torch.cat([torch.empty(0, self.columns.num_floats), *self._chunks(files)])

    def _chunks(self, files: Sequence[AnyTable]) -> Iterator[Tensor]:
        encoder = Encoder(self.columns, fix=FIX)
        for rows, _, _ in encoder.chunks(files):
            yield torch.from_numpy(rows)
        self.unknown, self.missing = encoder.unknown, encoder.missing
        encoder.warn_of_unknown()
        kinds = {column.name: column.kind for column in self.columns.columns}
        for name, count in encoder.missing.items():
            instead = "no category is set" if kinds[name] == "category" else "the training mean is used"
            rows_have = "1 row has" if count == 1 else f"{count:,} rows have"
            log.warning("column %r: %s no value; %s", name, rows_have, instead)
