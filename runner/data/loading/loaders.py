"""Chooses how a split is loaded, by its size and the device's free memory, and says why."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from runner.data.conversion import STANDARD, Conversion
from runner.data.loading.batches import Batches, Resident
from runner.data.loading.order import ClassSampler, permutation
from runner.data.loading.own_loader import OwnLoader, Served
from runner.data.loading.streamed import LARGER, Streamed, free_room
from runner.device.capabilities import TOO_LARGE_BYTES, legal_dtype
from runner.device.hardware import num_usable_cpus
from runner.device.host_memory import size_in_words
from runner.device.placement import num_bytes, tensors
from runner.errors import RunnerError

__all__ = ["Batches", "Loading", "Resident", "Streamed", "load", "permutation"]

#: a set is kept on the device if it takes at most this part of the free memory; the rest is for the step
MAX_OF_FREE_MEMORY = 0.5
#: automatic worker processes: more only help if a row takes very long to read
MAX_WORKERS = 4
#: the same if a process imports everything again (macOS, Windows), which takes seconds and 300 MB. A split that is only
#: evaluated has one, and fewer rows than this are read in less time than it starts in
MAX_FRESH_WORKERS, FEW_ROWS = 2, 1_000
#: bytes of shared memory from which worker processes are started: a container has 64 MiB by default
MIN_ROOM = 2**28


@dataclass(frozen=True)
class Loading:
    """Where rows are kept, and which processes read them.

    free_bytes: of the device; None if unknown. num_workers: None for automatic. num_processes: that train on this machine.
    """

    residency: str = "auto"
    free_bytes: int | None = None
    num_workers: int | None = None
    num_processes: int = 1
    conversion: Conversion = STANDARD


def load(
    rows: Any,
    loading: Loading,
    *,
    batch_size: int,
    device: torch.device,
    seed: int,
    shuffle: bool,
    sampler: ClassSampler | None = None,
) -> tuple[Batches, str]:
    """Return the batches of a split, and why they are loaded so. Raises: RunnerError if they don't fit as requested."""
    settings: dict[str, Any] = {"batch_size": batch_size, "device": device, "seed": seed}
    if isinstance(rows, OwnLoader):
        served = Served(rows, **settings, conversion=loading.conversion)
        name = f"your DataLoader, batches of {served.batch_size}" if rows.is_loader else "your IterableDataset"
        how = "by its own state" if served.has_state else "by reading again what it has had"
        return served, f"streamed ({name}; a run goes on {how})"  # words: ok
    settings["shuffle"] = shuffle and (sampler or True)
    if not isinstance(rows, Dataset):
        is_on_device, reason = _residency(rows, loading, device)
        reason += "; rows in memory need no worker processes" if loading.num_workers else ""
        return Resident(rows, **settings) if is_on_device else Streamed(rows, **settings), reason
    workers, reason = loading.num_workers, "streamed (a Dataset is read row by row)"
    if workers is None:
        workers, room = automatic_workers(rows, loading.num_processes, is_training=shuffle), free_room()
        if workers and room is not None and room < MIN_ROOM:
            workers, reason = 0, f"{reason}; read in this process: /dev/shm has {size_in_words(room)}, use {LARGER}"
    return Streamed(rows, num_workers=workers, conversion=loading.conversion, **settings), reason


def automatic_workers(rows: Any, num_processes: int = 1, *, is_training: bool = True) -> int:
    """Return how many processes read a Dataset for each training process: at most four, fewer without fork."""
    allowed = num_usable_cpus()
    if (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork":
        return max(1, min(MAX_WORKERS, allowed // num_processes))
    if is_training:
        return max(1, min(MAX_FRESH_WORKERS, allowed // num_processes))
    return int(len(rows) >= FEW_ROWS)


def _residency(rows: Any, loading: Loading, device: torch.device) -> tuple[bool, str]:
    size, free = num_bytes(rows), loading.free_bytes
    problem = _too_large(rows, device)
    if loading.residency == "stream":
        return False, "streamed (as asked)"  # words: ok
    is_on_host = device.type == "cpu"  # whose memory has the rows already
    if loading.residency == "device":
        if not problem and free is not None and size > free and not is_on_host:
            problem = f"the data set takes {size_in_words(size)}, and `{device}` has {size_in_words(free)} free"
        if problem:
            fix = "use `data.residency=stream`, or fewer rows with `data.limit=N`"
            raise RunnerError.of("data.residency=device", problem, fix)
        return True, "on the device (as asked)"  # words: ok
    if problem:
        return False, f"streamed (auto: {problem})"
    if free is None:
        return True, f"on the device (auto: {size_in_words(size)})"
    if size <= free * MAX_OF_FREE_MEMORY:
        return True, f"on the device (auto: {size_in_words(size)} of {size_in_words(free)} free)"
    if is_on_host:
        return True, f"on the device (auto: {size_in_words(size)} are in the CPU's memory already)"
    return False, f"streamed (auto: {size_in_words(size)} is over half of the {size_in_words(free)} free)"


def _too_large(rows: Any, device: torch.device) -> str:
    limit = TOO_LARGE_BYTES.get(device.type)
    largest = max((tensor.numel() * legal_dtype(tensor.dtype, device).itemsize for tensor in tensors(rows)), default=0)
    if limit is None or largest < limit:
        return ""
    return (
        f"a tensor of {size_in_words(largest)}, and {device.type} ends a process that has one of {size_in_words(limit)}"
    )
