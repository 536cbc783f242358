"""Computes which rows of each batch belong to one of several training processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rows:
    """Rows start to stop of a batch. A process that would have none reads one that counts nothing."""

    start: int
    stop: int
    num: int  # that count
    of: int  # of the whole batch


@dataclass(frozen=True)
class Share:
    """A process's part of a batch."""

    batch: Any
    rows: Rows


@dataclass(frozen=True)
class Shard:
    """Which of `num` processes this one is. All of them together have each row once."""

    rank: int
    num: int

    def rows(self, size: int) -> Rows:
        """The part of a batch of `size` rows: parts differ by one row at most."""
        start, stop = size * self.rank // self.num, size * (self.rank + 1) // self.num
        if start == stop:  # it takes part in what all compute together, with somebody else's row
            start = min(start, size - 1)
            return Rows(start, start + 1, 0, size)
        return Rows(start, stop, stop - start, size)

    def of_batches(self, num_rows: int, batch_size: int, *, first_batch: int) -> Iterator[Rows]:
        """Its part of each batch of an epoch, from `first_batch` on."""
        for start in range(first_batch * batch_size, num_rows, batch_size):
            yield self.rows(min(batch_size, num_rows - start))


class Sharded:
    """Batches of which only one process's shares come out, as Share."""

    def __init__(self, batches: Any, shard: Shard) -> None:
        self._batches, self._shard = batches, shard
        self.num_rows: int = batches.num_rows
        self.batch_size: int = batches.batch_size
        self.device_bytes: int = batches.device_bytes

    @property
    def num_batches(self) -> int:
        count: int = self._batches.num_batches
        return count

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Share]:
        shares: Iterator[Share] = self._batches.epoch(number, first_batch=first_batch, shard=shard or self._shard)
        return shares

    def indexed(self) -> None:
        """A process's share is not read that way."""

    def close(self) -> None:
        self._batches.close()
