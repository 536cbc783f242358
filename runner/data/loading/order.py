"""A seed and what it is for go in; generators and permutations come out, drawn on the host, the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

#: what a stream of random numbers is for: no two of them share one
SPLIT, EPOCH, BATCH, ROWS, FINISH = range(5)

_MASK = 2**64 - 1


def permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    """(count,) int64 on the host: the order of an epoch."""
    return torch.randperm(count, generator=generator(seed, EPOCH, epoch))


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
