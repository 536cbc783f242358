"""Stands for a split with its first batch alone, for `train.check`: what measures it takes as long as one batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from runner.data.loading.loaders import Batches
from runner.data.loading.shard import Shard


class FirstBatch:
    """One batch of a split; see loaders.Batches."""

    num_batches = 1

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.batch_size, self.device_bytes = batches.batch_size, batches.device_bytes
        self.num_rows = min(batches.num_rows, batches.batch_size)

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        return islice(self._batches.epoch(number, shard=shard), first_batch, 1)

    def indexed(self) -> None:
        """No steps read them."""

    def close(self) -> None:
        self._batches.close()
