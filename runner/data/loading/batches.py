"""The batches of a split, whole or a process's shares of them, after the data's transform; those of a split on the device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.loading.order import FINISH, ClassSampler, Orders, generator
from runner.device.placement import in_batches, map_tensors, move, num_bytes, num_rows, tensors


@dataclass(frozen=True)
class RowRange:
    """Rows start to stop of a batch. A process without a row reads one that doesn't count."""

    start: int
    stop: int
    num: int  # that count
    of: int  # of the whole batch


@dataclass(frozen=True)
class Share:
    """A process's part of a batch."""

    batch: Any
    rows: RowRange


@dataclass(frozen=True)
class Shard:
    """One of `num` processes, which together have each row once."""

    rank: int = 0
    num: int = 1

    def rows(self, size: int) -> RowRange:
        """Return the part of a batch of `size` rows. Parts differ by at most one row."""
        start, stop = size * self.rank // self.num, size * (self.rank + 1) // self.num
        if start == stop:  # it takes part in collective operations with another process's row
            start = min(start, size - 1)
            return RowRange(start, start + 1, 0, size)
        return RowRange(start, stop, stop - start, size)

    def of_batches(self, num_rows: int, batch_size: int, *, first_batch: int) -> Iterator[RowRange]:
        """Yield the part of each batch of an epoch, from `first_batch` on."""
        for start in range(first_batch * batch_size, num_rows, batch_size):
            yield self.rows(min(batch_size, num_rows - start))


class BatchTransform:
    """Applies module(batch, draws) -> batch on the device: cuts windows, augments images, ...

    In training the module gets `draws`, (B, module.num_draws) float32 in [0, 1), which are drawn on the host for a whole
    epoch and depend only on position and epoch: a resumed run, and one on another device, gets the same.
    """

    def __init__(self, module: nn.Module, *, device: torch.device, seed: int, is_training: bool) -> None:
        self._module, self._device, self._seed = module.train(is_training), device, seed
        self.num_draws = int(getattr(module, "num_draws", 0)) if is_training else 0
        self.num_bytes = num_bytes([*module.parameters(), *module.buffers()])

    def draws(self, epoch: int, num_rows: int) -> Tensor:  # (N, num_draws)
        if not self.num_draws:
            return torch.empty(num_rows, 0, device=self._device)
        drawn = torch.rand(num_rows, self.num_draws, generator=generator(self._seed, FINISH, epoch))
        return sent(drawn, self._device)

    def __call__(self, batch: Any, draws: Tensor) -> Any:
        """Return the changed batch, or the changed Share; draws: of the whole batch."""
        with torch.no_grad():
            if isinstance(batch, Share):  # a row has the same draws in any process
                return Share(self._module(batch.batch, draws[batch.rows.start : batch.rows.stop]), batch.rows)
            return self._module(batch, draws)


class Batches:
    """A split, ready to be trained or evaluated on, in an order that only the seed decides. Subclasses define `_read`."""

    num_rows: int
    batch_size: int
    row_bytes: int = 0  # on the device
    transform: BatchTransform | None = None

    @property
    def num_batches(self) -> int:
        """The number of batches of an epoch; the last one may be smaller."""
        return -(-self.num_rows // self.batch_size)

    @property
    def device_bytes(self) -> int:
        """The bytes on the device."""
        return self.row_bytes + (self.transform.num_bytes if self.transform else 0)

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """Return the epoch's batches, on the device; from `first_batch` on they are the same as without it.

        Args:
            shard: One of several processes, which gets its rows of each batch as a Share; None for whole batches.
        """
        batches = self._read(number, first_batch, shard)
        if self.transform is None:
            return batches
        draws = self.transform.draws(number, self.num_rows).split(self.batch_size)[first_batch:]
        return (self.transform(batch, own) for batch, own in zip(batches, draws, strict=True))

    def _read(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        raise NotImplementedError

    def indexed(self) -> Any:
        """Return the rows for steps that read on the device (runner.data.loading.batches.Indexed); None if they aren't there."""
        return None

    def close(self) -> None:
        """End what an epoch started. A later epoch starts it again."""


class FirstAndLast(Batches):
    """The first batch of a split, and its last one if it is smaller, for `train.check`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.batch_size, self.row_bytes = batches.batch_size, batches.device_bytes
        missing = batches.num_batches * batches.batch_size - batches.num_rows  # in the last batch
        self._has_last = batches.num_batches > 1 and 0 < missing < batches.batch_size
        last = (batches.batch_size - missing) * self._has_last
        self.num_rows = min(batches.num_rows, batches.batch_size) + last

    @property
    def num_batches(self) -> int:
        return 1 + self._has_last

    def _read(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        if first_batch == 0:
            yield from islice(self._batches.epoch(number, shard=shard), 1)
        if first_batch < self.num_batches == 2:
            yield from self._batches.epoch(number, first_batch=self._batches.num_batches - 1, shard=shard)

    def indexed(self) -> Any:
        return self._batches.indexed()

    def close(self) -> None:
        self._batches.close()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device; to CUDA from pinned memory, so that nothing waits."""
    if device.type == "cuda":
        return move(tensor.pin_memory(), device, non_blocking=True)
    return move(tensor, device)


#: bytes of rows that are gathered at once, so that several batches share the cost of a call. On the CPU they stay in its
#: caches; other devices have fewer launches
GATHER_BYTES, GATHER_BYTES_ELSEWHERE = {"cpu": 2**20}, 2**24
MAX_BATCHES_A_GATHER = 64
#: batches of a gather begin at multiples of these bytes, as allocations of torch do: the alignment of its inputs chooses
#: a kernel, and the bits of a step must not depend on how many steps are taken at a time
ALIGNMENT = 512


class Resident(Batches):
    """The whole split on the device: one copy, and a few batches of extra memory.

    An epoch's order is drawn on the host and moved once. Batches are views of a temporary copy, so that a model may write
    into its inputs.
    """

    def __init__(
        self, rows: Any, *, batch_size: int, device: torch.device, seed: int, shuffle: bool | ClassSampler
    ) -> None:
        self.num_rows, self.batch_size = num_rows(rows), batch_size
        self._rows = move(rows, device)
        self._chosen: Tensor | None = None
        self._device, self._orders = device, Orders(self.num_rows, seed=seed, sampler=shuffle) if shuffle else None
        self.row_bytes = num_bytes(self._rows)
        self._batches_a_gather = batches_a_gather(rows, batch_size, device)

    def with_batch_size(self, batch_size: int) -> Resident:
        """Return the same rows, not copied, in batches of another size."""
        other = copy.copy(self)
        other.batch_size = batch_size
        other._batches_a_gather = batches_a_gather(self._rows, batch_size, self._device)
        return other

    def share(self, rows: Any, chosen: Tensor | None = None) -> None:
        """Read the same rows from a set on the device that several runs share. chosen: their indices; None for all."""
        self._rows, self._chosen = rows, chosen
        self.row_bytes = 0 if chosen is None else chosen.nbytes

    def _read(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        """Yield the batches of epoch `number` without waiting for the device."""
        order = None if self._orders is None else sent(self._orders.of(number), self._device)
        if self._chosen is not None:
            order = self._chosen if order is None else self._chosen.index_select(0, order)
        if shard is not None:
            parts = shard.of_batches(self.num_rows, self.batch_size, first_batch=first_batch)
            for start, rows in zip(
                itertools.count(first_batch * self.batch_size, self.batch_size), parts, strict=False
            ):
                yield Share(map_tensors(self._rows, _gather(order, start + rows.start, start + rows.stop)), rows)
            return
        size = self.batch_size * self._batches_a_gather
        for start in range(first_batch * self.batch_size, self.num_rows, size):
            gather = _gather(order, start, min(start + size, self.num_rows))
            yield from in_batches(map_tensors(self._rows, gather), self.batch_size)

    def indexed(self) -> Indexed:
        return Indexed(self._rows, self.num_rows, self._orders, self._device, self._chosen, self.transform)

    def close(self) -> None:
        if self._orders is not None:
            self._orders.close()


def batches_a_gather(rows: Any, batch_size: int, device: torch.device) -> int:
    """Return how many batches are gathered at once."""
    gather_bytes = GATHER_BYTES.get(device.type, GATHER_BYTES_ELSEWHERE)
    batch_bytes = max(1, num_bytes(rows) * batch_size // max(1, num_rows(rows)))
    return min(MAX_BATCHES_A_GATHER, max(1, gather_bytes // batch_bytes))


class Indexed:
    """A set on the device whose batches are selected by a tensor there, and not by the host.

    A CUDA graph holds addresses: the order of each epoch is written into the same memory.
    """

    def __init__(
        self,
        rows: Any,
        num_rows: int,
        orders: Orders | None,
        device: torch.device,
        chosen: Tensor | None,
        transform: BatchTransform | None,
    ) -> None:
        self._rows, self._orders, self._device, self._chosen = rows, orders, device, chosen
        self.has_images = any(tensor.dim() == 4 for tensor in tensors(rows))
        self._order = torch.arange(num_rows, device=device) if chosen is None else chosen.clone()
        self._transform = transform
        self._draws = torch.empty(num_rows, transform.num_draws if transform else 0, device=device)

    def begin(self, epoch: int) -> None:
        """Copy the epoch's order and draws to the device without waiting for it."""
        if self._orders is not None:
            order = sent(self._orders.of(epoch), self._device)
            self._order.copy_(order if self._chosen is None else self._chosen.index_select(0, order))
        if self._transform is not None and self._transform.num_draws:
            self._draws.copy_(self._transform.draws(epoch, len(self._draws)))

    def gather(self, positions: Tensor, *, out: Any = None) -> Any:
        """Return the rows at positions, (B,) int64 on the device, of the epoch's order; with a transform (rows, draws).

        out: an earlier result to overwrite.
        """
        if self._transform is None:
            return self._gathered(positions, out)
        rows, draws = (None, None) if out is None else out
        draws = torch.index_select(self._draws, 0, positions, out=draws)
        return self._gathered(positions, rows), draws

    def _gathered(self, positions: Tensor, out: Any) -> Any:
        chosen = self._order.index_select(0, positions)
        if out is None:
            return map_tensors(self._rows, lambda tensor: tensor.index_select(0, chosen))
        for tensor, written in zip(tensors(self._rows), tensors(out), strict=True):
            torch.index_select(tensor, 0, chosen, out=written)
        return out

    def batches(self, gathered: Any, sizes: Sequence[int]) -> list[Any]:
        """Split gathered rows into batches of these sizes, which are views, and transform them."""
        if self._transform is None:
            return list(in_batches(gathered, list(sizes)))
        rows, draws = gathered
        return list(map(self._transform, in_batches(rows, list(sizes)), draws.split(list(sizes))))

    def most_at_once(self, num_rows: int) -> int:
        """Return how many times that many rows are gathered at once."""
        return batches_a_gather(self._rows, num_rows, self._device)

    def is_aligned(self, num_rows: int) -> bool:
        """Return whether the rows after that many gathered ones have the alignment of an allocation."""
        return all(num_rows * (num_bytes(tensor) // len(tensor)) % ALIGNMENT == 0 for tensor in tensors(self._rows))


def _gather(order: Tensor | None, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    if order is None:
        return lambda tensor: tensor[start:stop].clone()
    chosen = order[start:stop]
    return lambda tensor: tensor.index_select(0, chosen)
