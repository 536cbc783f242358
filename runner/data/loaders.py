"""Splits on the host go in; batches that already lie on the device come out, in an order that the seed alone decides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from runner.errors import Fault, RunnerError
from runner.placement import map_tensors, move, num_bytes, num_rows, tensors

#: batches gathered by one index_select: per batch it costs 45 us beside a step of 400 (2 cores, 2026-11), in chunks 3
BATCHES_A_GATHER = 16
#: a set is kept on the device when it takes at most this part of the free memory; the rest is for the step
MOST_OF_FREE_MEMORY = 0.5
MIB = 2**20


class Batches(Protocol):
    """A split, ready to be trained on or evaluated."""

    num_rows: int
    batch_size: int

    @property
    def num_batches(self) -> int: ...

    def epoch(self, number: int, *, first_batch: int = 0) -> Iterator[Any]:
        """The batches of an epoch, on the device, the last one smaller; from `first_batch` on, the same as without it."""
        ...

    def close(self) -> None:
        """Ends what the loader started."""
        ...


class Resident:
    """The whole split on the device. An epoch is one permutation, drawn on the host and moved once, and gathers by index."""

    def __init__(self, rows: Any, *, batch_size: int, device: torch.device, seed: int, shuffle: bool) -> None:
        self.num_rows, self.batch_size = num_rows(rows), batch_size
        self._rows = move(rows, device)
        self._device, self._seed, self._shuffle = device, seed, shuffle

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def epoch(self, number: int, *, first_batch: int = 0) -> Iterator[Any]:
        if not self._shuffle:
            for start in range(first_batch * self.batch_size, self.num_rows, self.batch_size):
                stop = start + self.batch_size
                yield map_tensors(self._rows, lambda tensor, start=start, stop=stop: tensor[start:stop])  # type: ignore[misc]
            return
        order = permutation(self.num_rows, seed=self._seed, epoch=number).to(self._device)
        for chunk in order[first_batch * self.batch_size :].split(self.batch_size * BATCHES_A_GATHER):
            yield from self._batches_of(chunk)

    def _batches_of(self, chunk: Tensor) -> Iterator[Any]:
        """One gather a tensor, then views: nested rows become a list of nested batches."""
        pieces: list[list[Tensor]] = [
            list(tensor.index_select(0, chunk).split(self.batch_size)) for tensor in tensors(self._rows)
        ]
        for batch in zip(*pieces, strict=True):
            if isinstance(self._rows, tuple) and len(self._rows) == len(batch) and type(self._rows) is tuple:
                yield batch
            else:
                leaves = iter(batch)
                yield map_tensors(self._rows, lambda _, leaves=leaves: next(leaves))  # type: ignore[misc]

    def close(self) -> None:
        pass


class Streamed:
    """Batches that come over one by one: read by workers where that pays, one ahead of the step.

    On CUDA the next batch is copied from pinned memory on a side stream while the step computes.
    """

    def __init__(
        self,
        rows: Any,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
        shuffle: bool,
        num_workers: int | None = None,
    ) -> None:
        self._dataset = rows if isinstance(rows, Dataset) else _Rows(rows)
        self.num_rows, self.batch_size = len(self._dataset), batch_size  # type: ignore[arg-type]
        self._device, self._seed, self._shuffle = device, seed, shuffle
        self._num_workers = automatic_workers(rows) if num_workers is None else num_workers
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def epoch(self, number: int, *, first_batch: int = 0) -> Iterator[Any]:
        loader = iter(self._loader(number, first_batch))
        try:
            ahead = self._fetch(loader)
            while ahead is not None:
                batch, ahead = ahead, None
                self._wait_for(batch)
                ahead = self._fetch(loader)  # its copy runs while the step computes
                yield batch
        finally:
            stop = getattr(loader, "_shutdown_workers", None)
            if stop is not None:
                stop()  # also when the epoch was left in the middle; DataLoader would wait for the collector

    def close(self) -> None:
        pass

    def _loader(self, number: int, first_batch: int) -> DataLoader[Any]:
        order = (
            permutation(self.num_rows, seed=self._seed, epoch=number) if self._shuffle else torch.arange(self.num_rows)
        )
        indices = [part.tolist() for part in order.split(self.batch_size)][first_batch:]
        generator = torch.Generator().manual_seed(_mixed(self._seed, number))  # seeds the workers
        return DataLoader(
            self._dataset,
            batch_sampler=indices,
            num_workers=self._num_workers,
            collate_fn=_as_it_is if isinstance(self._dataset, _Rows) else default_collate,
            pin_memory=self._side is not None,
            generator=generator,
            multiprocessing_context="spawn" if self._num_workers and self._device.type != "cpu" else None,
        )

    def _fetch(self, loader: Iterator[Any]) -> Any | None:
        batch = next(loader, None)
        if batch is None:
            return None
        if self._side is None:
            return move(batch, self._device)
        with torch.cuda.stream(self._side):
            return move(batch, self._device, non_blocking=True)

    def _wait_for(self, batch: Any) -> None:
        """The device waits for the copy, the host does not; the allocator learns who uses the memory."""
        if self._side is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._side)
        for tensor in tensors(batch):
            tensor.record_stream(current)


def load(
    rows: Any,
    *,
    residency: str,
    free_bytes: int | None,
    batch_size: int,
    device: torch.device,
    seed: int,
    shuffle: bool,
    num_workers: int | None = None,
) -> tuple[Batches, str]:
    """The loader for a split, and why it is the one. `free_bytes`: of the device; None where nobody can tell.

    Raises: RunnerError for a Dataset that is asked to live on the device.
    """
    if isinstance(rows, Dataset):
        if residency == "device":
            so = "a Dataset is read row by row and can't be put on the device whole"
            raise RunnerError(
                Fault("data.residency=device", so, "data.residency=stream, or tensors from your function")
            )
        where, why = "stream", "streamed (a Dataset is read row by row)"
    elif residency == "auto":
        where, why = _by_size(num_bytes(rows), free_bytes)
    else:
        where, why = residency, f"{'on the device' if residency == 'device' else 'streamed'} (as asked)"
    if where == "device":
        return Resident(rows, batch_size=batch_size, device=device, seed=seed, shuffle=shuffle), why
    streamed = Streamed(rows, batch_size=batch_size, device=device, seed=seed, shuffle=shuffle, num_workers=num_workers)
    return streamed, why


def permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    """(count,) int64 on the host: the order of an epoch, the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(_mixed(seed, epoch)))


def automatic_workers(rows: Any) -> int:
    """Processes that read a streamed set: none for tensors in memory, up to four for a Dataset."""
    return min(4, os.cpu_count() or 1) if isinstance(rows, Dataset) else 0


def _by_size(size: int, free: int | None) -> tuple[str, str]:
    if free is None or size <= free * MOST_OF_FREE_MEMORY:
        room = "" if free is None else f" of {_size(free)} free"
        return "device", f"on the device (auto: {_size(size)}{room})"
    return "stream", f"streamed (auto: {_size(size)} is over half of the {_size(free)} free)"


def _size(count: int) -> str:
    return f"{count / MIB / 1024:.1f} GiB" if count >= 1024 * MIB else f"{count / MIB:.1f} MiB"


def _mixed(seed: int, epoch: int) -> int:
    """One 63-bit seed from two numbers, by the steps of splitmix64 (Steele, Lea, Flood 2014): neighbours share nothing."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch + 1) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) & (2**63 - 1)


class _Rows(Dataset[Any]):
    """Tensors in memory as a Dataset that gives a whole batch at once."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return num_rows(self._rows)

    def __getitems__(self, indices: list[int]) -> Any:
        chosen = torch.tensor(indices)
        return map_tensors(self._rows, lambda tensor: tensor.index_select(0, chosen))


def _as_it_is(batch: Any) -> Any:
    return batch
