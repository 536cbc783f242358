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
from torch.utils.data import Dataset

from runner.data.tables.files import TableFile
from runner.device.host_memory import memory_left
from runner.errors import RunnerError

#: the variable that names the folder for what is made of big tables; without it, ~/.cache/runner
CACHE_VARIABLE = "RUNNER_CACHE"
#: rows in memory cost so many times their size: the splits are copies, and so is what is read while they fill
COPIES = 2.5
#: of what lies in the cache: another number where rows are made otherwise
FORMAT = 2
INPUTS, TARGETS, SIZES = "inputs.f32", "targets.npy", "sizes.json"
Chunks = Iterator[tuple[Any, Any]]  # (n, F) float32 and (n,) int64 or (n, T) float32


class MappedRows(Dataset[Any]):
    """Rows that stay on the disk: (F,) float32, and a class or (T,) float32. A batch costs one read for each page it meets.

    Whole batches by `__getitems__`. Processes that read it open the file for themselves.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sizes = json.loads((folder / SIZES).read_text())
        self.fingerprint: str = sizes["fingerprint"]
        self._shape = (sizes["num_rows"], sizes["num_floats"])
        self._maps: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return int(self._shape[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = self._opened()
        chosen = np.asarray(indices)
        return torch.from_numpy(inputs[chosen]), torch.from_numpy(targets[chosen])

    def collate_fn(self, rows: Any) -> Any:
        """A batch is one already; single rows are stacked."""
        if isinstance(rows, list):
            return tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return rows

    def targets_in_memory(self) -> Tensor:
        """All of them, read once."""
        return torch.from_numpy(np.array(self._opened()[1]))

    def mapped_tensors(self) -> tuple[Tensor, Tensor]:
        """What the rows are in memory, of which only that is read which somebody looks at."""
        inputs = np.memmap(self.folder / INPUTS, np.float32, mode="r", shape=self._shape)  # "c" counts as memory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of what can't be written to
            return torch.from_numpy(inputs), torch.from_numpy(np.load(self.folder / TARGETS, mmap_mode="r"))

    def _opened(self) -> tuple[Any, Any]:
        if self._maps is None:
            inputs = np.memmap(self.folder / INPUTS, np.float32, mode="r", shape=self._shape)
            self._maps = inputs, np.load(self.folder / TARGETS, mmap_mode="r")
        return self._maps

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}  # NumPy would send the whole file along


def fits_in_memory(num_bytes: int, asked: str | bool) -> tuple[bool, str]:
    """Whether rows of that size are kept in memory, and why. asked: auto, true or false. Raises: RunnerError."""
    if isinstance(asked, bool):
        return asked, "as asked"
    if asked != "auto":
        problem = "`data.in_memory` must be `auto`, `true` (memory) or `false` (a mapped file)"
        raise RunnerError.of(f"data.in_memory={asked}", problem, "use `data.in_memory=auto`, `true` or `false`")
    left, whose = memory_left()
    is_small = num_bytes * COPIES <= left / 2
    return is_small, f"auto: {num_bytes / 2**20:,.1f} MiB of rows, {left / 2**20:,.0f} MiB {whose}"


def gathered(chunks: Chunks, *, num_rows: int | None = None, num_floats: int) -> tuple[Tensor, Tensor]:
    """The rows as tensors. num_rows: where it is known, memory is taken once."""
    inputs = np.empty((num_rows, num_floats), np.float32) if num_rows is not None else None
    parts: list[Any] = []
    targets: list[Any] = []
    filled = 0
    for rows, some in chunks:
        if inputs is None:
            parts.append(rows)
        else:
            inputs[filled : filled + len(rows)] = rows
        filled += len(rows)
        targets.append(some)
    whole = inputs if inputs is not None else np.concatenate(parts or [np.empty((0, num_floats), np.float32)])
    return torch.from_numpy(whole), torch.from_numpy(np.concatenate(targets)) if targets else torch.empty(0)


def mapped(key: str, make: Callable[[], Chunks], *, plan: dict[str, Any], num_bytes: int, asked: str) -> MappedRows:
    """The rows in a file of the cache, which the first process that needs them makes; others wait for it.

    key: a name for what the rows are made of. plan: what remembered_plan() gives back from then on. num_bytes: about what
    they will take on the disk.
    Raises: RunnerError where the disk has no room for them, or the folder can't be written to.
    """
    from filelock import FileLock

    folder = cache() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{key}.lock")):
            if not (folder / SIZES).is_file():
                _check_room(folder.parent, num_bytes)
                _make(folder, make(), plan)
    except OSError as error:
        problem = f"the table doesn't fit into memory, and its rows can't be written to {folder.parent}: {error}"
        fix = f"set `{CACHE_VARIABLE}` to a directory on a disk with free space"
        raise RunnerError.of(asked, problem, fix) from error
    return MappedRows(folder)


def remembered_plan(key: str) -> dict[str, Any] | None:
    """What mapped() was given when these rows were written; None where they were not."""
    try:
        plan: dict[str, Any] = json.loads((cache() / key / SIZES).read_text())["plan"]
    except OSError:
        return None
    return plan


def cache_key(files: Sequence[TableFile], how: Mapping[str, Any]) -> str:
    """A name for the rows of these files as they are now, read as the settings `how` say."""
    told = [(str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps([FORMAT, told, how], default=list).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', files[0].path.stem)[:40]}-{digest[:24]}"


def cache() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "runner").expanduser() / "tables"


def _make(folder: Path, chunks: Chunks, plan: dict[str, Any]) -> None:
    place = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        digest, num_rows, num_floats, targets = hashlib.sha256(), 0, 0, []
        with (place / INPUTS).open("wb") as file:
            for rows, some in chunks:
                file.write(rows.data)
                digest.update(rows.data)
                digest.update(np.ascontiguousarray(some).data)
                num_rows, num_floats = num_rows + len(rows), rows.shape[1]
                targets.append(some)
        np.save(place / TARGETS, np.concatenate(targets))
        sizes = {"num_rows": num_rows, "num_floats": num_floats, "fingerprint": digest.hexdigest(), "plan": plan}
        (place / SIZES).write_text(json.dumps(sizes))
        shutil.rmtree(folder, ignore_errors=True)
        place.replace(folder)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise OSError(f"they take {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
