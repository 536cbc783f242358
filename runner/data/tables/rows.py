"""Reads the rows of table files into tensors in memory, or into a cached file that is memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.map_style import BatchDataset
from runner.data.tables.files import TableFile
from runner.device.host_memory import memory_left
from runner.errors import RunnerError

#: the variable that names the directory for large tables' rows (default: ~/.cache/runner)
CACHE_VARIABLE = "RUNNER_CACHE"
#: rows in memory take this many times their size: the splits are copies, and so is each chunk that is read
COPIES = 2.5
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


def fits_in_memory(num_bytes: int, asked: str | bool) -> tuple[bool, str]:
    """Return whether rows of this size are kept in memory, and why. asked: auto, true or false. Raises: RunnerError."""
    if isinstance(asked, bool):
        return asked, "as asked"
    if asked != "auto":
        problem = "`data.in_memory` must be `auto`, `true` (memory) or `false` (a mapped file)"
        raise RunnerError.of(f"data.in_memory={asked}", problem, "use `data.in_memory=auto`, `true` or `false`")
    left, limit = memory_left()
    is_small = num_bytes * COPIES <= left / 2
    return is_small, f"auto: {num_bytes / 2**20:,.1f} MiB of rows, {left / 2**20:,.0f} MiB {limit}"


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


def mapped(key: str, make: Callable[[], Chunks], *, plan: dict[str, Any], num_bytes: int, asked: str) -> MappedRows:
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
        raise RunnerError.of(asked, problem, fix) from error
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
