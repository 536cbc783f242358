"""Limits a split to its first batch, and its last one where that is smaller, for `train.check`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from runner.data.loading.loaders import Batches
from runner.data.loading.shard import Shard


class FirstAndLast:
    """One or two batches of a split; see loaders.Batches."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.batch_size, self.device_bytes = batches.batch_size, batches.device_bytes
        missing = batches.num_batches * batches.batch_size - batches.num_rows  # in the last batch
        self.num_batches = 2 if batches.num_batches > 1 and 0 < missing < batches.batch_size else 1
        last = batches.batch_size - missing if self.num_batches == 2 else 0
        self.num_rows = min(batches.num_rows, batches.batch_size) + last

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        if first_batch == 0:
            yield from islice(self._batches.epoch(number, shard=shard), 1)
        if first_batch < self.num_batches == 2:
            yield from self._batches.epoch(number, first_batch=self._batches.num_batches - 1, shard=shard)

    def indexed(self) -> Any:
        """The rows on the device; in their order those of a smaller last batch follow the first batch."""
        return self._batches.indexed()

    def close(self) -> None:
        self._batches.close()
