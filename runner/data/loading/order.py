"""Makes random generators and the orders of epochs from a seed and their purpose, on the host."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runner.device import backends

CPU = torch.device("cpu")

#: the purposes of random numbers, each with its own stream
SPLIT, EPOCH, BATCH, ROWS, FINISH = range(5)

_MASK = 2**64 - 1


def permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    """Return (count,) int64 on the host: the order of an epoch."""
    return torch.randperm(count, generator=generator(seed, EPOCH, epoch))


@dataclass(frozen=True)
class ClassSampler:
    """Draws rows with replacement: a class by its share, then one of its rows."""

    below: Tensor  # (C,) float64: the cumulated shares of the classes, the last of which is 1
    by_class: Tensor  # (N,) int64, the rows, class after class
    sizes: Tensor  # (C,) int64, the number of rows of each

    def order(self, *, seed: int, epoch: int) -> Tensor:
        """Return (N,) int64 on the host: the rows of an epoch."""
        share, place = torch.rand(2, len(self.by_class), dtype=torch.float64, generator=generator(seed, EPOCH, epoch))
        classes = torch.searchsorted(self.below, share, right=True)
        first = self.sizes.cumsum(0) - self.sizes
        return self.by_class[first[classes] + (place * self.sizes[classes]).long()]


#: rows from which the next epoch's order is drawn ahead: that of 10 million takes a second
MANY_ROWS = 2**20


class Orders:
    """The orders of a split's epochs. A thread draws a large split's next order while an epoch is trained on."""

    def __init__(self, count: int, *, seed: int, sampler: ClassSampler | bool = True) -> None:
        """sampler: what draws the rows; True: each comes once."""
        draw = sampler.order if isinstance(sampler, ClassSampler) else partial(permutation, count)
        self._draw = partial(draw, seed=seed)
        self._draws_ahead = count >= MANY_ROWS
        self._thread: threading.Thread | None = None
        self._next: dict[int, Tensor] = {}  # the next order, by its epoch

    def of(self, epoch: int) -> Tensor:
        self._join()
        order = self._next[epoch] if epoch in self._next else self._draw(epoch=epoch)
        self._next.clear()
        if self._draws_ahead:
            self._thread = threading.Thread(target=self._draw_ahead, args=(epoch + 1,), daemon=True)
            self._thread.start()
        return order

    def close(self) -> None:
        self._join()
        self._next.clear()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _draw_ahead(self, epoch: int) -> None:
        self._next[epoch] = self._draw(epoch=epoch)


def generator(*numbers: int) -> torch.Generator:
    """Return a generator of the host with a seed of these numbers."""
    return torch.Generator().manual_seed(mixed(*numbers))


def seed_host(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch's CPU; torch.manual_seed() would seed the device, too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the host's generators for the block."""
    with backends.generators_restored(CPU):
        seed_host(seed)
        yield


def mixed(*numbers: int) -> int:
    """Return one 63-bit seed of several numbers, by a splitmix64 step for each (Steele, Lea and Flood, 2014).

    torch's CPU generator uses only the low 32 bits of its seed.
    """
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value & (2**63 - 1)
