"""The batches of a split: of an epoch, whole or a process's shares of them, after the data's transform."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.loading.order import FINISH, generator
from runner.device.placement import move, num_bytes


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
        """Return the rows for steps that read on the device (runner.data.loading.resident.Indexed); None if they aren't there."""
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
