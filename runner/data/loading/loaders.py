"""Chooses how a split is loaded, by its size and the device's free memory, and says why."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from runner.data.loading.order import ClassSampler, permutation
from runner.data.loading.resident import Resident
from runner.data.loading.served import Served
from runner.data.loading.shard import Shard
from runner.data.loading.streamed import Streamed, bytes_of_a_batch, free_room, with_room
from runner.data.map_style import STANDARD, Conversion
from runner.data.own_loader import OwnLoader
from runner.device.capabilities import TOO_LARGE_BYTES, legal_dtype
from runner.device.hardware import num_usable_cpus
from runner.device.host_memory import size_in_words
from runner.device.placement import num_bytes, tensors
from runner.errors import RunnerError

__all__ = ["Batches", "Loading", "Resident", "Streamed", "load", "permutation"]

#: a set is kept on the device when it takes at most this part of the free memory; the rest is for the step
MOST_OF_FREE_MEMORY = 0.5
#: processes that read a Dataset, where nothing is said: more only help where a row takes very long
MOST_WORKERS = 4
#: where a process imports everything anew (macOS, Windows): 2 to 4 s, some 300 MB and a copy of the Dataset each. A split
#: that is only evaluated gets one, and none where reading its rows takes no longer than the start: so many of 3 ms
MOST_FRESH_WORKERS = 2
FEW_ROWS = 1_000


class Batches(Protocol):
    """A split, ready to be trained or evaluated on, in an order that the seed alone decides."""

    num_rows: int
    batch_size: int

    @property
    def device_bytes(self) -> int:
        """That it keeps on the device."""
        ...

    @property
    def num_batches(self) -> int:
        """Of a whole epoch; the last batch may be smaller."""
        ...

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """The epoch's batches, on the device; from `first_batch` on they are the same as without it.

        shard: of several processes, the one whose rows are wanted: each batch comes as a Share (None: whole batches).
        """
        ...

    def indexed(self) -> Any:
        """The rows for steps that read on the device where they are (runner.data.loading.resident.Indexed); None if they aren't there."""
        ...

    def close(self) -> None:
        """Ends what the loader started. A later epoch starts it again."""
        ...


@dataclass(frozen=True)
class Loading:
    """Where the rows are to lie, and who reads them.

    residency: auto, device or stream. free_bytes: of the device; None where nobody can tell. num_workers: of a streamed
    set, None for automatic; of a person's own stream none. num_processes: that train on this machine, and load each its own.
    conversion: of batches that a Dataset or DataLoader gives.
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
    """The loader for a split, and why it is the one. sampler: draws what is shuffled (None: each row once an epoch).

    Raises: RunnerError for a set that is asked to lie on the device and can't.
    """
    settings: dict[str, Any] = dict(batch_size=batch_size, device=device, seed=seed, shuffle=shuffle, sampler=sampler)
    residency, num_workers, num_processes = loading.residency, loading.num_workers, loading.num_processes
    if isinstance(rows, OwnLoader):
        return _served(rows, batch_size=batch_size, device=device, seed=seed, conversion=loading.conversion)
    on_device, reason = _residency(rows, residency, device=device, free_bytes=loading.free_bytes)
    if on_device:
        return Resident(rows, **settings), reason
    workers = automatic_workers(rows, num_processes, is_training=shuffle) if num_workers is None else num_workers
    if workers and (free := free_room()) is not None:
        batch_bytes = bytes_of_a_batch(rows, -(-batch_size // num_processes), loading.conversion)
        workers, why = with_room(workers, batch_bytes, free // num_processes, is_asked=num_workers is not None)
        reason += why
    return Streamed(rows, num_workers=workers, conversion=loading.conversion, **settings), reason


def _served(rows: OwnLoader, **settings: Any) -> tuple[Served, str]:
    served = Served(rows, **settings)
    what = f"your DataLoader, batches of {served.batch_size}" if rows.is_loader else "your IterableDataset"
    goes_on = "by its own state" if served.tells_state else "by reading again what it has had"
    return served, f"streamed ({what}; a run goes on {goes_on})"


def automatic_workers(rows: Any, num_processes: int = 1, *, is_training: bool = True) -> int:
    """Processes that read a streamed set: none for tensors in memory, for a Dataset one a CPU and four at most; fewer
    where a process does not begin as a fork.

    num_processes: that train on this machine and share its CPUs; each has one reader at least.
    """
    if not isinstance(rows, Dataset):
        return 0
    allowed = num_usable_cpus()
    if (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork":
        return max(1, min(MOST_WORKERS, allowed // num_processes))
    if is_training:
        return max(1, min(MOST_FRESH_WORKERS, allowed // num_processes))
    return int(len(rows) >= FEW_ROWS)  # type: ignore[arg-type]


def _residency(rows: Any, asked: str, *, device: torch.device, free_bytes: int | None) -> tuple[bool, str]:
    if isinstance(rows, Dataset):
        return False, "streamed (a Dataset is read row by row)"
    size = num_bytes(rows)
    free = None if device.type == "cpu" else free_bytes  # the CPU's memory has the rows already
    too_large = _too_large(rows, device)
    if asked == "device":
        if too_large:
            fix = "use `data.residency=stream`, or fewer rows with `data.limit=N`"
            raise RunnerError.of("data.residency=device", too_large, fix)
        if free is not None and size > free:
            problem = f"the data set takes {size_in_words(size)}, and `{device}` has {size_in_words(free)} free"
            raise RunnerError.of(
                "data.residency=device", problem, "use `data.residency=stream`, or fewer rows with `data.limit=N`"
            )
        return True, "on the device (as asked)"
    if asked == "stream":
        return False, "streamed (as asked)"
    if too_large:
        return False, f"streamed (auto: {too_large})"
    if free is not None and size > free * MOST_OF_FREE_MEMORY:
        return False, f"streamed (auto: {size_in_words(size)} is over half of the {size_in_words(free)} free)"
    if free_bytes is None:
        return True, f"on the device (auto: {size_in_words(size)})"
    if size > free_bytes * MOST_OF_FREE_MEMORY:
        return True, f"on the device (auto: {size_in_words(size)} lie in the CPU's memory already)"
    return True, f"on the device (auto: {size_in_words(size)} of {size_in_words(free_bytes)} free)"


def _too_large(rows: Any, device: torch.device) -> str:
    limit = TOO_LARGE_BYTES.get(device.type)
    largest = max((tensor.numel() * legal_dtype(tensor.dtype, device).itemsize for tensor in tensors(rows)), default=0)
    if limit is None or largest < limit:
        return ""
    return (
        f"a tensor of {size_in_words(largest)}, and {device.type} ends a process that has one of {size_in_words(limit)}"
    )
