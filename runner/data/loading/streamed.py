"""Serves batches of rows on the host or of a Dataset: reads them and copies them to the device one after the other.

Worker processes hand their batches over in shared memory, of which a container has 64 MiB by default.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from runner.data.conversion import STANDARD, Conversion, batch_of
from runner.data.loading.batches import Batches, Shard, Share, batches_a_gather
from runner.data.loading.order import BATCH, ClassSampler, Orders, generator, mixed, seeded
from runner.device import streams
from runner.device.placement import in_batches, map_tensors, move, num_rows, tensors
from runner.errors import Problem, RunnerError, in_words

SHARED_MEMORY = Path("/dev/shm")
#: batches that each process reads ahead (the default of torch)
PREFETCH = 2
LARGER = "a larger /dev/shm (docker run --shm-size=8g)"


@dataclass(frozen=True)
class Refused:
    """Sent by a worker process instead of a batch: torch would send only the message of a RunnerError."""

    problems: tuple[Problem, ...]


def free_room() -> int | None:
    """Return the free bytes of shared memory; None without a limit."""
    if not sys.platform.startswith("linux") or not SHARED_MEMORY.is_dir():
        return None
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


Planned = tuple[int, list[int]]  # of a batch: the seed of its random numbers, and the indices of its rows


class Reader:
    """A DataLoader that gets the plan of its batches before each epoch. Its processes stay from epoch to epoch."""

    def __init__(self, dataset: Any, conversion: Conversion = STANDARD, *, num_workers: int, pin_memory: bool) -> None:
        self._plan, self._num_workers = _Plan(), num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _PlannedBatches(dataset, conversion),
            batch_sampler=self._plan,
            num_workers=num_workers,
            prefetch_factor=PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            generator=generator(0),  # else the workers' seeds are drawn from the run's generator
        )

    def read(self, plan: Iterator[Planned]) -> Iterator[Any]:
        """Yield the batches. Raises: RunnerError for an error in a worker process, or without shared memory."""
        self._plan.batches = plan
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below has it, with its fix
                batches = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if not self._num_workers:
                raise
            problem = f"the Dataset can't be sent to the loading processes: {error}"
            fix = "use `data.num_workers=0`, or a Dataset without lambdas, open files and classes inside functions"
            raise RunnerError.of(f"data.num_workers={self._num_workers}", problem, fix) from error
        return self._checked(batches)

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batch in batches:
                if isinstance(batch, Refused):
                    raise RunnerError(*batch.problems)
                yield batch
        except (RuntimeError, RunnerError) as error:  # raised by torch, or by a collate_fn without memory
            if not self._num_workers or "shared memory" not in str(error):
                raise
            problem = (
                f"the loading processes found no space in /dev/shm: {(free_room() or 0) / 2**20:,.1f} MiB are free"
            )
            fix = f"use `data.num_workers=0` or fewer of them, a smaller `train.batch_size`, or {LARGER}"
            raise RunnerError.of(f"data.num_workers={self._num_workers}", problem, fix) from error

    def close(self) -> None:
        """End the processes and wait for that. DataLoader itself leaves it to the garbage collector."""
        stop = getattr(self._loader._iterator, "_shutdown_workers", None)
        if stop is not None:
            stop()


class _Plan:
    """The batch sampler of a DataLoader."""

    batches: Iterator[Planned] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class _PlannedBatches(Dataset[Any]):
    def __init__(self, dataset: Any, conversion: Conversion) -> None:
        self._dataset, self._conversion = dataset, conversion

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, planned: Planned) -> Any:
        is_worker = get_worker_info() is not None
        try:
            batch = self._batch(*planned)
            if is_worker:
                # torch would move the batch in a thread, which fails unnoticed without room, and the training would wait
                for tensor in tensors(batch):
                    if tensor.layout is torch.strided and tensor.device.type == "cpu":
                        tensor.share_memory_()
            return batch
        except RunnerError as error:
            if not is_worker:
                raise
            return Refused(error.problems)
        except SystemExit as error:
            if not is_worker:
                raise
            raise RuntimeError(in_words(error)) from error  # else the process ends without a reason

    def _batch(self, seed: int, indices: list[int]) -> Any:
        with seeded(seed):
            several = getattr(self._dataset, "__getitems__", None)
            rows = several(indices) if several else [self._dataset[index] for index in indices]
            return self._conversion(batch_of(self._dataset, rows))


def _unchanged(batch: Any) -> Any:
    return batch


class Streamed(Batches):
    """Batches that are copied one by one, in Resident's order: of rows that are too large for the device, or a Dataset.

    The processes that read a Dataset end with `close()`, or with an unfinished epoch.
    """

    def __init__(
        self,
        rows: Any,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
        shuffle: bool | ClassSampler,
        num_workers: int = 0,
        conversion: Conversion = STANDARD,
    ) -> None:
        self._rows, self.batch_size = rows, batch_size
        self.num_rows = len(rows) if isinstance(rows, Dataset) else num_rows(rows)  # type: ignore[arg-type]
        self._device, self._seed = device, seed
        self._orders = Orders(self.num_rows, seed=seed, sampler=shuffle) if shuffle else None
        self._num_workers, self._conversion = num_workers, conversion
        self._side = streams.side_stream(device)
        self._idle: Reader | None = None

    def _read(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        """Yield the batches of epoch `number`. Waits for the host's reading, but not for a copy on a device with streams."""
        kind = self._of_dataset if isinstance(self._rows, Dataset) else self._gathered
        batches = kind(number, first_batch, shard)
        if shard is None:
            return batches
        return map(Share, batches, shard.of_batches(self.num_rows, self.batch_size, first_batch=first_batch))

    def _gathered(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        """Gather and copy several batches at a time, in half the time that a DataLoader takes for small ones."""

        def blocks() -> Iterator[tuple[Any, list[int]]]:
            indices = iter(self._indices(number, first_batch, shard))
            while block := list(islice(indices, batches_a_gather(self._rows, self.batch_size, self._device))):
                gather = partial(_gather, indices=torch.cat(block), pinned=self._side is not None)
                yield map_tensors(self._rows, gather), [len(one) for one in block]

        for rows, sizes in self._moved(blocks()):
            yield from in_batches(rows, sizes)

    def _of_dataset(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        reader, is_finished = self._idle, False
        self._idle = None  # a second epoch at the same time gets its own
        if reader is None:
            is_pinned = self._side is not None
            reader = Reader(self._rows, self._conversion, num_workers=self._num_workers, pin_memory=is_pinned)
        try:
            yield from self._moved(reader.read(self._plan(number, first_batch, shard)))
            is_finished = True
        finally:
            if is_finished and self._idle is None:
                self._idle = reader
            else:
                reader.close()

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._side is None:
            return (move(batch, self._device) for batch in batches)
        return copied_ahead(batches, self._device, side=self._side)

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        if self._orders is not None:
            self._orders.close()

    def _plan(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Planned]:
        """Yield a seed and the rows of each batch, so that it does not depend on the process that reads it."""
        others = (shard.rank,) if shard is not None and shard.rank else ()
        for index, indices in enumerate(self._indices(number, first_batch, shard), start=first_batch):
            yield mixed(self._seed, BATCH, number, index, *others), indices.tolist()

    def _indices(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Tensor]:
        order = None if self._orders is None else self._orders.of(number)
        parts = (shard or Shard()).of_batches(self.num_rows, self.batch_size, first_batch=first_batch)
        for index, rows in enumerate(parts, start=first_batch):
            start, stop = index * self.batch_size + rows.start, index * self.batch_size + rows.stop
            yield torch.arange(start, stop) if order is None else order[start:stop]


def _gather(tensor: Tensor, *, indices: Tensor, pinned: bool) -> Tensor:
    """Select rows, directly into pinned memory, so that they are not copied twice."""
    if not pinned:
        return tensor.index_select(0, indices)
    out = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=out)


def copied_ahead(batches: Iterator[Any], device: torch.device, *, side: torch.Stream) -> Iterator[Any]:
    """Yield batches in pinned memory, each copied on the stream `side` during the step before it. The host does not wait."""

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
        current.wait_stream(side)  # for the copy of this batch; the next one has not started
        for tensor in tensors(batch):
            tensor.record_stream(current)  # it was made on `side`, whose next copy may get its memory during the step
        ahead = copy()
        yield batch
