"""Makes random generators and the orders of epochs from a seed and their purpose: drawn on the host, the same everywhere.

A large split's next order is drawn in a thread while an epoch runs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

#: what a stream of random numbers is for: no two of them share one
SPLIT, EPOCH, BATCH, ROWS, FINISH = range(5)

_MASK = 2**64 - 1


def permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    """(count,) int64 on the host: the order of an epoch."""
    return torch.randperm(count, generator=generator(seed, EPOCH, epoch))


@dataclass(frozen=True)
class ClassSampler:
    """Rows by chance, with replacement: a class by its share, then any of its rows.

    Searches among the classes, and sums over no rows: 60,000 of them take 1.6 ms, 10 million 0.8 s (1 thread, 2026-11).
    """

    below: Tensor  # (C,) float64: the shares summed up to each class, its own included; 0 of a class without rows; the last is 1
    by_class: Tensor  # (N,) int64, the rows, class after class
    sizes: Tensor  # (C,) int64, how many rows each has

    def order(self, *, seed: int, epoch: int) -> Tensor:
        """(N,) int64 on the host: the rows of an epoch, in the place of permutation()'s."""
        share, place = torch.rand(2, len(self.by_class), dtype=torch.float64, generator=generator(seed, EPOCH, epoch))
        classes = torch.searchsorted(self.below, share, right=True)
        first = self.sizes.cumsum(0) - self.sizes
        return self.by_class[first[classes] + (place * self.sizes[classes]).long()]


#: rows from which the next epoch's order is drawn ahead: that of 10 million takes a second, of 60,000 a millisecond
MANY_ROWS = 2**20


class Orders:
    """The orders of a split's epochs. That of a large split's next epoch is drawn by a thread while this one is trained on;
    it takes 8 bytes a row of the host's memory."""

    def __init__(self, count: int, *, seed: int, sampler: ClassSampler | None = None) -> None:
        """sampler: draws them (None: each row comes once an epoch)."""
        self._count, self._seed, self._sampler = count, seed, sampler
        self._thread: threading.Thread | None = None
        self._found: dict[int, Tensor] = {}  # by epoch

    def of(self, epoch: int) -> Tensor:
        """See permutation()."""
        found = self._end_thread()
        order = found[epoch] if epoch in found else self._draw(epoch)
        if self._count >= MANY_ROWS:
            self._found = {}
            self._thread = threading.Thread(target=self._draw_ahead, args=(epoch + 1, self._found), daemon=True)
            self._thread.start()
        return order

    def close(self) -> None:
        """Waits for the thread, and forgets what it has drawn."""
        self._end_thread()

    def _end_thread(self) -> dict[int, Tensor]:
        if self._thread is not None:
            self._thread.join()
        found, self._found, self._thread = self._found, {}, None
        return found

    def _draw_ahead(self, epoch: int, found: dict[int, Tensor]) -> None:
        found[epoch] = self._draw(epoch)

    def _draw(self, epoch: int) -> Tensor:
        if self._sampler is not None:
            return self._sampler.order(seed=self._seed, epoch=epoch)
        return permutation(self._count, seed=self._seed, epoch=epoch)


def generator(*numbers: int) -> torch.Generator:
    """A generator of the host's, its seed mixed from `numbers`."""
    return torch.Generator().manual_seed(mixed(*numbers))


def mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers: a splitmix64 step for each (Steele, Lea and Flood, 2014).

    torch's CPU generator takes the low 32 bits of its seed and nothing else, so that 1 and 2**32 + 1 would draw alike.
    """
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value & (2**63 - 1)
