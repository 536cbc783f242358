"""Serves batches of a split that lies on the device as a whole: copied there once, gathered there by index."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.data.loading.order import ClassSampler, Orders
from runner.data.loading.shard import Shard, Share
from runner.device.placement import in_batches, map_tensors, move, num_bytes, num_rows, tensors

#: gathered at once, in bytes of rows, so that several batches share the cost of a call. On the CPU no more than stays in
#: its caches: 128 of 60,000 rows of 64 floats take 6 us a batch with 1 MiB, 13 with 4 MiB, 14 singly, and 28 as x[rows]
#: (1 thread, torch 2.13, 2026-11). Elsewhere more, for fewer launches; not measured.
GATHER_BYTES = {"cpu": 2**20}
GATHER_BYTES_ELSEWHERE = 2**24
MOST_BATCHES_A_GATHER = 64
#: where a batch of several begins in memory, in bytes: a multiple of it, as torch's own allocations. Kernels are chosen by
#: the alignment of what they read, and a step's bits must not depend on how many are taken at a time
ALIGNMENT = 512


class Resident:
    """The whole split on the device: one copy, then no more. Extra memory: some batches at a time, 1 MiB on the
    CPU and 16 MiB elsewhere, or one batch where that is bigger.

    An epoch's order is drawn on the host and moved once. Batches are views of a copy that nobody keeps, so a
    model that writes into its inputs does no harm.
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
    ) -> None:
        """shuffle: whether there is chance in the order, that of `sampler` where there is one."""
        self.num_rows, self.batch_size = num_rows(rows), batch_size
        self._rows = move(rows, device)
        self._chosen: Tensor | None = None
        self._device, self._orders = device, Orders(self.num_rows, seed=seed, sampler=sampler) if shuffle else None
        self.device_bytes = num_bytes(self._rows)
        self._batches_a_gather = batches_a_gather(rows, batch_size, device)

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def with_batch_size(self, batch_size: int) -> Resident:
        """Return the same rows, not copied, in batches of another size."""
        other = copy.copy(self)
        other.batch_size = batch_size
        other._batches_a_gather = batches_a_gather(self._rows, batch_size, self._device)
        return other

    def share(self, rows: Any, chosen: Tensor | None = None) -> None:
        """Reads the same rows from now on in a set that several runs have in common, and keeps no copy of them.

        rows: the set, on the device. chosen: which of them are the split's, (num_rows,) int64 there; None for all.
        """
        self._rows, self._chosen = rows, chosen
        self.device_bytes = 0 if chosen is None else chosen.nbytes

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """The batches of epoch `number` from `first_batch` on. Waits for nothing: the host runs ahead of the device."""
        size = self.batch_size * self._batches_a_gather
        order = None if self._orders is None else sent(self._orders.of(number), self._device)
        if self._chosen is not None:
            order = self._chosen if order is None else self._chosen.index_select(0, order)
        if shard is not None:
            yield from self._shares(shard, order, first_batch)
            return
        for start in range(first_batch * self.batch_size, self.num_rows, size):
            gather = _gather(order, start, min(start + size, self.num_rows))
            yield from in_batches(map_tensors(self._rows, gather), self.batch_size)

    def _shares(self, shard: Shard, order: Tensor | None, first_batch: int) -> Iterator[Share]:
        parts = shard.of_batches(self.num_rows, self.batch_size, first_batch=first_batch)
        for index, rows in enumerate(parts, start=first_batch):
            start = index * self.batch_size
            yield Share(map_tensors(self._rows, _gather(order, start + rows.start, start + rows.stop)), rows)

    def indexed(self) -> Indexed:
        """The same rows, for steps that read on the device where they are."""
        return Indexed(self._rows, self.num_rows, orders=self._orders, device=self._device, chosen=self._chosen)

    def close(self) -> None:
        if self._orders is not None:
            self._orders.close()


def batches_a_gather(rows: Any, batch_size: int, device: torch.device) -> int:
    """How many batches are gathered at once."""
    gather_bytes = GATHER_BYTES.get(device.type, GATHER_BYTES_ELSEWHERE)
    batch_bytes = max(1, num_bytes(rows) * batch_size // max(1, num_rows(rows)))
    return min(MOST_BATCHES_A_GATHER, max(1, gather_bytes // batch_bytes))


class Indexed:
    """A set on the device whose batches are read where a tensor says, and not where the host does.

    A CUDA graph holds addresses: the order of each epoch is written into the same memory.
    """

    def __init__(
        self, rows: Any, num_rows: int, *, orders: Orders | None, device: torch.device, chosen: Tensor | None = None
    ) -> None:
        """orders: of its epochs (None: as the rows lie). chosen: which of the rows, see Resident.share()."""
        self._rows, self._orders, self._device, self._chosen = rows, orders, device, chosen
        self.has_images = any(tensor.dim() == 4 for tensor in tensors(rows))
        self._order = torch.arange(num_rows, device=device) if chosen is None else chosen.clone()

    def begin(self, epoch: int) -> None:
        """Brings the epoch's order over; waits for nothing."""
        if self._orders is not None:
            order = sent(self._orders.of(epoch), self._device)
            self._order.copy_(order if self._chosen is None else self._chosen.index_select(0, order))

    def gather(self, places: Tensor, *, out: Any = None) -> Any:
        """The rows at `places` of the epoch's order, (B,) int64 on the device. out: those of an earlier call, to be written to."""
        chosen = self._order.index_select(0, places)
        if out is None:
            return map_tensors(self._rows, lambda tensor: tensor.index_select(0, chosen))
        for tensor, written in zip(tensors(self._rows), tensors(out), strict=True):
            torch.index_select(tensor, 0, chosen, out=written)
        return out

    def batches(self, rows: Any, sizes: Sequence[int]) -> list[Any]:
        """Gathered rows in batches of those sizes, views of them."""
        return list(in_batches(rows, list(sizes)))

    def most_at_once(self, num_rows: int) -> int:
        """How often so many rows may be gathered together, see GATHER_BYTES."""
        return batches_a_gather(self._rows, num_rows, self._device)

    def is_aligned(self, num_rows: int) -> bool:
        """Whether what follows so many gathered rows begins in memory as rows that are gathered alone do."""
        return all(num_rows * (num_bytes(tensor) // len(tensor)) % ALIGNMENT == 0 for tensor in tensors(self._rows))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on its way to the device; on CUDA through pinned memory, so that nothing waits for it."""
    if device.type == "cuda":
        return move(tensor.pin_memory(), device, non_blocking=True)
    return move(tensor, device)


def _gather(order: Tensor | None, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    if order is None:
        return lambda tensor: tensor[start:stop].clone()
    chosen = order[start:stop]
    return lambda tensor: tensor.index_select(0, chosen)
