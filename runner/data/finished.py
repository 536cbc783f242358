"""A split's batches on the device go in; the same come out finished there: windows cut, images augmented, ..."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from runner.data.loaders import Batches
from runner.data.order import FINISH, generator
from runner.data.shard import Shard, Share
from runner.placement import move, num_bytes


class Finished:
    """Batches that a module finishes on the device: module(batch, draws) -> batch, in training mode for the training split.

    Whatever is random in it comes from `draws`, (B, module.num_draws) float32 in [0, 1): drawn on the host for a whole
    epoch and moved once, by row and epoch alone, so that a run that is resumed, and one on another device, gets the same.
    """

    def __init__(
        self, batches: Batches, module: nn.Module, *, device: torch.device, seed: int, is_training: bool
    ) -> None:
        self._batches, self._device, self._seed = batches, device, seed
        self._module = module.train(is_training)
        self._num_draws = int(getattr(module, "num_draws", 0)) if is_training else 0
        self.num_rows, self.batch_size = batches.num_rows, batches.batch_size
        self.device_bytes = batches.device_bytes + num_bytes([*module.parameters(), *module.buffers()])

    @property
    def num_batches(self) -> int:
        return self._batches.num_batches

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """The batches of epoch `number` from `first_batch` on. Waits for what the batches wait for, and no more."""
        draws = torch.empty(self.num_rows, 0, device=self._device)
        if self._num_draws:
            draws = torch.rand(self.num_rows, self._num_draws, generator=generator(self._seed, FINISH, number))
            is_cuda = self._device.type == "cuda"
            draws = move(draws.pin_memory() if is_cuda else draws, self._device, non_blocking=is_cuda)
        batches = self._batches.epoch(number, first_batch=first_batch, shard=shard)
        for batch, some in zip(batches, draws.split(self.batch_size)[first_batch:], strict=True):
            with torch.no_grad():
                if isinstance(batch, Share):  # what is drawn for a row is the same whichever process has it
                    own = some[batch.rows.start : batch.rows.stop]
                    finished: Any = Share(self._module(batch.batch, own), batch.rows)
                else:
                    finished = self._module(batch, some)
            yield finished

    def close(self) -> None:
        self._batches.close()
