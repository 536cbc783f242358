"""Serves batches of rows on the host or of a Dataset: reads them and copies them to the device one after the other.

Worker processes hand their batches over in shared memory, of which a container has 64 MiB by default.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from runner.data.loading.order import BATCH, ClassSampler, Orders, generator, mixed
from runner.data.loading.resident import batches_a_gather
from runner.data.loading.shard import Shard, Share
from runner.data.map_style import STANDARD, Conversion, batch_of
from runner.device import streams
from runner.device.placement import in_batches, map_tensors, move, num_bytes, num_rows, tensors
from runner.errors import OF_CODE, Problem, RunnerError, in_words

PLACE = Path("/dev/shm")
#: batches that each process reads ahead (the default of torch)
PREFETCH = 2
BIGGER = "a larger /dev/shm (docker run --shm-size=8g)"


@dataclass(frozen=True)
class Refused:
    """Sent by a worker process instead of a batch: torch would send only the message of a RunnerError."""

    problems: tuple[Problem, ...]


def free_room() -> int | None:
    """Return the free bytes of /dev/shm; None on systems without it."""
    if not sys.platform.startswith("linux") or not PLACE.is_dir():
        return None
    found = os.statvfs(PLACE)
    return found.f_bavail * found.f_frsize


def most_workers(free: int, batch_bytes: int, *, prefetch: int = PREFETCH) -> int:
    """Processes for whose batches there is room: `prefetch` of each, and the one that training has."""
    return max(0, (free // max(batch_bytes, 1) - 1) // prefetch)


def bytes_of_a_batch(rows: Any, batch_size: int, conversion: Conversion = STANDARD) -> int:
    """Return the bytes of a batch by its first row; 0 if it can't be read."""
    if not isinstance(rows, Dataset):
        return num_bytes(rows) * batch_size // max(1, num_rows(rows))
    try:
        several = getattr(rows, "__getitems__", None)
        return num_bytes(conversion(batch_of(rows, several([0]) if several else [rows[0]]))) * batch_size
    except OF_CODE:  # the user's code: the reading reports the error
        return 0


def with_room(workers: int, batch_bytes: int, free: int | None, *, is_asked: bool) -> tuple[int, str]:
    """Return the number of worker processes, and why they are fewer.

    Args:
        free: Bytes of shared memory; None for no known limit.
        is_asked: Whether the user set the number of workers.

    Raises:
        RunnerError: There is no room for the number that the user set.
    """
    if not workers or free is None or (most := most_workers(free, batch_bytes)) >= workers:
        return workers, ""
    needed = (workers * PREFETCH + 1) * batch_bytes
    room = (
        f"/dev/shm has {free / 2**20:,.1f} MiB free, and batches for {workers} processes take {needed / 2**20:,.1f} MiB"
    )
    if is_asked:
        fewer = f"`data.num_workers={most}`, " if most else ""
        fix = f"use {fewer}`data.num_workers=0`, a smaller `train.batch_size`, or {BIGGER}"
        raise RunnerError.of(f"data.num_workers={workers}", room, fix)
    return most, f"; read by {most} processes: {room}" if most else f"; read in this process: {room}"


def told(batches: Iterator[Any], workers: int) -> Iterator[Any]:
    """Yield the batches. Raises: RunnerError if a worker process finds an error, or no shared memory."""
    try:
        for batch in batches:
            if isinstance(batch, Refused):
                raise RunnerError(*batch.problems)
            yield batch
    except (RuntimeError, RunnerError) as error:  # raised by torch, or by a collate_fn without memory
        if not workers or "shared memory" not in str(error):
            raise
        problem = f"the loading processes found no space in /dev/shm: {(free_room() or 0) / 2**20:,.1f} MiB are free"
        fix = f"use `data.num_workers=0` or fewer of them, a smaller `train.batch_size`, or {BIGGER}"
        raise RunnerError.of(f"data.num_workers={workers}", problem, fix) from error


Planned = tuple[int, list[int]]  # of a batch: the seed for what it draws, and the numbers of its rows


class Reader:
    """A DataLoader that is told its batches before each epoch, and its processes with it.

    They stay from epoch to epoch: 2 of them take 0.1 s to start by fork and 2 to 4 s by spawn (2 cores, 2026-11).
    """

    def __init__(self, rows: Any, conversion: Conversion = STANDARD, *, num_workers: int, pin_memory: bool) -> None:
        self._plan, self._num_workers = _Plan(), num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _FromDataset(rows, conversion) if isinstance(rows, Dataset) else _FromTensors(rows),
            batch_sampler=self._plan,
            num_workers=num_workers,
            prefetch_factor=PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            generator=generator(0),  # else the seeds that DataLoader gives to processes come from the run's own numbers
        )

    def read(self, plan: Iterator[Planned]) -> Iterator[Any]:
        self._plan.batches = plan
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below says it, with its mend
                return told(iter(self._loader), self._num_workers)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if not self._num_workers:
                raise
            problem = f"the Dataset can't be sent to the loading processes: {error}"
            fix = "use `data.num_workers=0`, or a Dataset without lambdas, open files and classes inside functions"
            raise RunnerError.of(f"data.num_workers={self._num_workers}", problem, fix) from error

    def close(self) -> None:
        """Ends the processes and waits for that; DataLoader itself leaves it to the garbage collector."""
        stop = getattr(self._loader._iterator, "_shutdown_workers", None)
        if stop is not None:
            stop()


class _Plan:
    """The batches of one epoch, as a DataLoader asks for them."""

    batches: Iterator[Planned] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class _FromTensors(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return num_rows(self._rows)

    def __getitems__(self, planned: Planned) -> Any:
        chosen = torch.tensor(planned[1])
        return _shared(map_tensors(self._rows, lambda tensor: tensor.index_select(0, chosen)))


class _FromDataset(Dataset[Any]):
    def __init__(self, dataset: Any, conversion: Conversion) -> None:
        self._dataset, self._conversion = dataset, conversion

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, planned: Planned) -> Any:
        try:
            return _shared(self._batch(*planned))
        except RunnerError as error:
            if get_worker_info() is None:
                raise
            return Refused(error.problems)
        except SystemExit as error:
            if get_worker_info() is None:
                raise
            raise RuntimeError(in_words(error)) from error  # else nobody hears why this process has gone

    def _batch(self, seed: int, chosen: list[int]) -> Any:
        with _drawing_from(seed):
            several = getattr(self._dataset, "__getitems__", None)
            rows = several(chosen) if several else [self._dataset[index] for index in chosen]
            return self._conversion(batch_of(self._dataset, rows))


def _shared(batch: Any) -> Any:
    """In a process that reads: the batch in shared memory, where the thread that sends it would put it. Without room it
    fails there unheard, and the training would wait for ever; here the error is handed over in the batch's place."""
    if get_worker_info() is not None:
        for tensor in tensors(batch):
            if tensor.layout is torch.strided and tensor.device.type == "cpu":
                tensor.share_memory_()
    return batch


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the device, too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _as_it_is(batch: Any) -> Any:
    return batch


class Streamed:
    """Batches that come over one by one, in Resident's order: for what is too big for the device, or is no tensor.

    rows: nested tensors, or a map-style Dataset, whose rows are put together by torch's rules. num_workers: processes
    that read; they stay from one epoch to the next and end with `close()`, or with an epoch that is left in the middle.
    """

    def __init__(
        self,
        rows: Any,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
        shuffle: bool,
        sampler: ClassSampler | None = None,
        num_workers: int = 0,
        conversion: Conversion = STANDARD,
    ) -> None:
        self._rows, self.batch_size = rows, batch_size
        self.num_rows = len(rows) if isinstance(rows, Dataset) else num_rows(rows)  # type: ignore[arg-type]
        self._device, self._seed = device, seed
        self._orders = Orders(self.num_rows, seed=seed, sampler=sampler) if shuffle else None
        self._num_workers, self._conversion = num_workers, conversion
        self._side = streams.side_stream(device)
        self._idle: Reader | None = None
        self.device_bytes = 0

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """The batches of epoch `number` from `first_batch` on; waits for the host's reading, with streams never for a copy."""
        is_read = isinstance(self._rows, Dataset) or self._num_workers
        batches = (self._read if is_read else self._gathered)(number, first_batch, shard)
        if shard is None:
            yield from batches
            return
        parts = shard.of_batches(self.num_rows, self.batch_size, first_batch=first_batch)
        for batch, rows in zip(batches, parts, strict=True):
            yield Share(batch, rows)

    def _gathered(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        """Batches of tensors in memory, several in one gather and one copy: small ones come in half the time that a
        DataLoader takes for the same (60,000 rows of 64 floats, 1 thread, 2026-11)."""

        def blocks() -> Iterator[tuple[Any, list[int]]]:
            places = iter(self._places(number, first_batch, shard))
            while block := list(islice(places, batches_a_gather(self._rows, self.batch_size, self._device))):
                chosen = torch.cat(block)
                rows = map_tensors(self._rows, partial(_gather, chosen=chosen, pinned=self._side is not None))
                yield rows, [len(one) for one in block]

        on_device = (
            ((move(rows, self._device), sizes) for rows, sizes in blocks())
            if self._side is None
            else copied_ahead(blocks(), self._device, side=self._side)
        )
        for rows, sizes in on_device:
            yield from in_batches(rows, sizes)

    def _read(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        reader, finished = self._idle or self._reader(), False
        self._idle = None  # another epoch beside this one gets its own
        try:
            batches = reader.read(self._plan(number, first_batch, shard))
            if self._side is None:
                for batch in batches:
                    yield move(batch, self._device)
            else:
                yield from copied_ahead(batches, self._device, side=self._side)
            finished = True
        finally:
            if finished and self._idle is None:
                self._idle = reader
            else:
                reader.close()

    def indexed(self) -> None:
        """Its rows are not on the device."""

    def close(self) -> None:
        """Ends the processes that wait for the next epoch; another epoch would start new ones."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        if self._orders is not None:
            self._orders.close()

    def _plan(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Planned]:
        """A seed and the rows for each batch, so that it is the same whoever reads it and whatever was read before.

        Processes that share a batch draw different numbers for it, the first one those of a run alone.
        """
        others = (shard.rank,) if shard is not None and shard.rank else ()
        for index, places in enumerate(self._places(number, first_batch, shard), start=first_batch):
            yield mixed(self._seed, BATCH, number, index, *others), places.tolist()

    def _places(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Tensor]:
        order = None if self._orders is None else self._orders.of(number)
        for start in range(first_batch * self.batch_size, self.num_rows, self.batch_size):
            stop = min(start + self.batch_size, self.num_rows)
            if shard is not None:
                own = shard.rows(stop - start)
                start, stop = start + own.start, start + own.stop
            yield torch.arange(start, stop) if order is None else order[start:stop]

    def _reader(self) -> Reader:
        return Reader(self._rows, self._conversion, num_workers=self._num_workers, pin_memory=self._side is not None)


def _gather(tensor: Tensor, *, chosen: Tensor, pinned: bool) -> Tensor:
    """The chosen rows; in pinned memory at once, so that they are not copied twice."""
    if not pinned:
        return tensor.index_select(0, chosen)
    out = torch.empty((len(chosen), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, chosen, out=out)


def copied_ahead(batches: Iterator[Any], device: torch.device, *, side: torch.Stream) -> Iterator[Any]:
    """The batches on a device with streams, each copied on the stream `side` while the step before it computes.

    batches: in pinned memory, which torch keeps until the copy is over. The host waits for nothing here.
    """

    def copy() -> Any:
        for batch in batches:
            with streams.use(side):
                return move(batch, device, non_blocking=True)
        return end

    end = object()
    ahead = copy()
    while ahead is not end:
        batch = ahead
        current = streams.current(device)
        current.wait_stream(side)  # for the copy of this batch: that of the next one is not on its way yet
        for tensor in tensors(batch):
            tensor.record_stream(current)  # made on `side`: else the next copy may get its memory while a step reads it
        ahead = copy()
        yield batch
