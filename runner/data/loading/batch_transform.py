"""Applies a module to each batch on the device: cuts windows, augments images, ... Draws random numbers on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from runner.data.loading.loaders import Batches
from runner.data.loading.order import FINISH, generator
from runner.data.loading.resident import Resident, sent
from runner.data.loading.shard import Shard, Share
from runner.device.placement import num_bytes


class TransformedBatches:
    """Batches that a module finishes on the device: module(batch, draws) -> batch, in training mode for the training split.

    Whatever is random in it comes from `draws`, (B, module.num_draws) float32 in [0, 1): drawn on the host for a whole
    epoch and moved once, by row and epoch alone, so that a run that is resumed, and one on another device, gets the same.
    """

    def __init__(
        self, batches: Batches, module: nn.Module, *, device: torch.device, seed: int, is_training: bool
    ) -> None:
        self.batches, self._device, self._seed = batches, device, seed
        self._module = module.train(is_training)
        self._num_draws = int(getattr(module, "num_draws", 0)) if is_training else 0
        self.num_rows, self.batch_size = batches.num_rows, batches.batch_size
        self._own_bytes = num_bytes([*module.parameters(), *module.buffers()])

    @property
    def device_bytes(self) -> int:
        return self.batches.device_bytes + self._own_bytes

    @property
    def num_batches(self) -> int:
        return self.batches.num_batches

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """The batches of epoch `number` from `first_batch` on. Waits for what the batches wait for, and no more."""
        draws = torch.empty(self.num_rows, 0, device=self._device)
        if self._num_draws:
            draws = self._draws(number)
        batches = self.batches.epoch(number, first_batch=first_batch, shard=shard)
        for batch, some in zip(batches, draws.split(self.batch_size)[first_batch:], strict=True):
            with torch.no_grad():
                if isinstance(batch, Share):  # what is drawn for a row is the same whichever process has it
                    own = some[batch.rows.start : batch.rows.stop]
                    finished: Any = Share(self._module(batch.batch, own), batch.rows)
                else:
                    finished = self._module(batch, some)
            yield finished

    def with_batch_size(self, batch_size: int) -> TransformedBatches:
        """See Resident."""
        other, resident = copy.copy(self), cast(Resident, self.batches)
        other.batches, other.batch_size = resident.with_batch_size(batch_size), batch_size
        return other

    def indexed(self) -> IndexedFinished | None:
        """The same, for steps that read on the device where they are; None where the rows don't lie there."""
        indexed = self.batches.indexed()
        draws = torch.empty(self.num_rows, self._num_draws, device=self._device)
        return None if indexed is None else IndexedFinished(indexed, self._module, draws, self._draws)

    def _draws(self, epoch: int) -> Tensor:  # (N, num_draws)
        drawn = torch.rand(self.num_rows, self._num_draws, generator=generator(self._seed, FINISH, epoch))
        return sent(drawn, self._device)

    def close(self) -> None:
        self.batches.close()


class IndexedFinished:
    """Finished batches that are read where a tensor says; see runner.data.loading.resident.Indexed."""

    def __init__(self, indexed: Any, module: nn.Module, draws: Tensor, draw: Callable[[int], Tensor]) -> None:
        self._indexed, self._module, self._draws, self._draw = indexed, module, draws, draw
        self.has_images: bool = indexed.has_images

    def begin(self, epoch: int) -> None:
        self._indexed.begin(epoch)
        if self._draws.numel():
            self._draws.copy_(self._draw(epoch))

    def gather(self, places: Tensor, *, out: Any = None) -> Any:
        rows, draws = (None, None) if out is None else out
        draws = torch.index_select(self._draws, 0, places, out=draws)
        return self._indexed.gather(places, out=rows), draws

    def batches(self, rows: Any, sizes: Sequence[int]) -> list[Any]:
        inner, draws = rows
        parts = zip(self._indexed.batches(inner, sizes), draws.split(list(sizes)), strict=True)
        with torch.no_grad():
            return [self._module(batch, some) for batch, some in parts]

    def most_at_once(self, num_rows: int) -> int:
        return int(self._indexed.most_at_once(num_rows))

    def is_aligned(self, num_rows: int) -> bool:
        return bool(self._indexed.is_aligned(num_rows))
