"""Applies a module to each batch on the device: cuts windows, augments images, ... Draws random numbers on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from runner.data.loading.batches import Batches, Shard, Share
from runner.data.loading.order import FINISH, generator
from runner.data.loading.resident import Resident, sent
from runner.device.placement import num_bytes


class TransformedBatches(Batches):
    """Batches after module(batch, draws) -> batch on the device, which is in training mode for the training split.

    Its random numbers are `draws`, (B, module.num_draws) float32 in [0, 1). They are drawn on the host for a whole epoch
    and depend only on row and epoch: a resumed run, and one on another device, gets the same.
    """

    def __init__(
        self, batches: Batches, module: nn.Module, *, device: torch.device, seed: int, is_training: bool
    ) -> None:
        self.batches, self._device, self._seed = batches, device, seed
        self._module = module.train(is_training)
        self._num_draws = int(getattr(module, "num_draws", 0)) if is_training else 0
        self.num_rows, self.batch_size = batches.num_rows, batches.batch_size

    @property
    def device_bytes(self) -> int:  # type: ignore[override]  # the batches' may change
        return self.batches.device_bytes + num_bytes([*self._module.parameters(), *self._module.buffers()])

    @property
    def num_batches(self) -> int:
        return self.batches.num_batches

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        draws = self._draws(number) if self._num_draws else torch.empty(self.num_rows, 0, device=self._device)
        batches = self.batches.epoch(number, first_batch=first_batch, shard=shard)
        for batch, some in zip(batches, draws.split(self.batch_size)[first_batch:], strict=True):
            with torch.no_grad():
                if isinstance(batch, Share):  # a row has the same draws in any process
                    own = some[batch.rows.start : batch.rows.stop]
                    transformed: Any = Share(self._module(batch.batch, own), batch.rows)
                else:
                    transformed = self._module(batch, some)
            yield transformed

    def with_batch_size(self, batch_size: int) -> TransformedBatches:
        other, resident = copy.copy(self), cast(Resident, self.batches)
        other.batches, other.batch_size = resident.with_batch_size(batch_size), batch_size
        return other

    def indexed(self) -> IndexedTransform | None:
        indexed = self.batches.indexed()
        draws = torch.empty(self.num_rows, self._num_draws, device=self._device)
        return None if indexed is None else IndexedTransform(indexed, self._module, draws, self._draws)

    def _draws(self, epoch: int) -> Tensor:  # (N, num_draws)
        drawn = torch.rand(self.num_rows, self._num_draws, generator=generator(self._seed, FINISH, epoch))
        return sent(drawn, self._device)

    def close(self) -> None:
        self.batches.close()


class IndexedTransform:
    """The transformed batches of a runner.data.loading.resident.Indexed, with its methods."""

    def __init__(self, indexed: Any, module: nn.Module, draws: Tensor, draw: Callable[[int], Tensor]) -> None:
        self._indexed, self._module, self._draws, self._draw = indexed, module, draws, draw
        self.has_images: bool = indexed.has_images
        self.most_at_once: Callable[[int], int] = indexed.most_at_once
        self.is_aligned: Callable[[int], bool] = indexed.is_aligned

    def begin(self, epoch: int) -> None:
        self._indexed.begin(epoch)
        if self._draws.numel():
            self._draws.copy_(self._draw(epoch))

    def gather(self, positions: Tensor, *, out: Any = None) -> Any:
        rows, draws = (None, None) if out is None else out
        draws = torch.index_select(self._draws, 0, positions, out=draws)
        return self._indexed.gather(positions, out=rows), draws

    def batches(self, rows: Any, sizes: Sequence[int]) -> list[Any]:
        inner, draws = rows
        parts = zip(self._indexed.batches(inner, sizes), draws.split(list(sizes)), strict=True)
        with torch.no_grad():
            return [self._module(batch, some) for batch, some in parts]
