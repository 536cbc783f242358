"""The batches of a split, whole, a process's shares of them, or only the first and the last one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any


class Batches:
    """A split, ready to be trained or evaluated on, in an order that only the seed decides."""

    num_rows: int
    batch_size: int
    device_bytes: int = 0  # on the device

    @property
    def num_batches(self) -> int:
        """The number of batches of an epoch; the last one may be smaller."""
        return -(-self.num_rows // self.batch_size)

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """Yield the epoch's batches, on the device; from `first_batch` on they are the same as without it.

        Args:
            shard: One of several processes, which gets its rows of each batch as a Share; None for whole batches.
        """
        raise NotImplementedError

    def indexed(self) -> Any:
        """Return the rows for steps that read on the device (runner.data.loading.resident.Indexed); None if they aren't there."""
        return None

    def close(self) -> None:
        """End what an epoch started. A later epoch starts it again."""


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

    rank: int
    num: int

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


class Sharded(Batches):
    """Batches of which only one process's shares come out, as Share."""

    def __init__(self, batches: Batches, shard: Shard) -> None:
        self._batches, self._shard = batches, shard
        self.num_rows, self.batch_size, self.device_bytes = batches.num_rows, batches.batch_size, batches.device_bytes

    @property
    def num_batches(self) -> int:
        return self._batches.num_batches

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Share]:
        return self._batches.epoch(number, first_batch=first_batch, shard=shard or self._shard)

    def close(self) -> None:
        self._batches.close()


class FirstAndLast(Batches):
    """The first batch of a split, and its last one if it is smaller, for `train.check`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.batch_size, self.device_bytes = batches.batch_size, batches.device_bytes
        missing = batches.num_batches * batches.batch_size - batches.num_rows  # in the last batch
        self._has_last = batches.num_batches > 1 and 0 < missing < batches.batch_size
        last = (batches.batch_size - missing) * self._has_last
        self.num_rows = min(batches.num_rows, batches.batch_size) + last

    @property
    def num_batches(self) -> int:
        return 1 + self._has_last

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        if first_batch == 0:
            yield from islice(self._batches.epoch(number, shard=shard), 1)
        if first_batch < self.num_batches == 2:
            yield from self._batches.epoch(number, first_batch=self._batches.num_batches - 1, shard=shard)

    def indexed(self) -> Any:
        return self._batches.indexed()

    def close(self) -> None:
        self._batches.close()
