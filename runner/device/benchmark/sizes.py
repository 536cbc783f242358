"""Defines how much is done of everything that is measured (Sizes), and one device under measurement (Bench)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runner.device.benchmark.timing import Spread, seconds_of, waiter

#: by dotted name, the unit at its end or before the dot
Figures = dict[str, Spread]


@dataclass(frozen=True)
class Sizes:
    """How much is done of everything. The defaults take some 10 s on two cores of 2020, less on a GPU."""

    first_large: int = 256  # rows of the first square matrix that is tried; doubled from there
    most_large: int = 32768
    small: int = 64
    product_seconds: float = 0.01  # what a large product takes at least: the doubling ends between this and 8 times it
    batch_seconds: float = 0.01  # what the calls between two looks at the clock take at least
    copy_bytes: int = 128 * 2**20
    memory_bytes: int = 256 * 2**20  # of each of two arrays: more than a cache holds
    repeats: int = 5
    most_spread: float = 50.0  # highest by lowest of a figure; above it the machine was busy


@dataclass(frozen=True)
class Bench:
    """One device under measurement."""

    device: torch.device
    sizes: Sizes
    free_bytes: int | None = None  # None: nobody could tell

    def seconds(self, call: Callable[[], object]) -> Spread:
        """Of one call, without a wait between calls."""
        sizes = self.sizes
        return seconds_of(call, waiter(self.device), repeats=sizes.repeats, least_seconds=sizes.batch_seconds)

    def at_most(self, wanted_bytes: int) -> int:
        """So much of what is free that the arrays of one work leave room for others."""
        return wanted_bytes if self.free_bytes is None else max(4, min(wanted_bytes, self.free_bytes // 8))
