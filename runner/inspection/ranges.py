"""Measures a tensor's values: their range, how many are not finite, in which rows. Waits for the device. For not_finite.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Range:
    """The least and the greatest value that is finite (None: none is), and how many are not."""

    least: float | None
    greatest: float | None
    count: int
    num_nan: int = 0
    num_inf: int = 0

    @property
    def num_not_finite(self) -> int:
        return self.num_nan + self.num_inf

    @property
    def size(self) -> float:
        """The greatest absolute value among the finite ones."""
        return max(abs(self.least or 0.0), abs(self.greatest or 0.0))


@torch.no_grad()
def range_of(tensor: Tensor) -> Range | None:
    """None for what holds no floating numbers, or none at all."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
        return None
    values = _wide(tensor)
    least, greatest = torch.stack(torch.aminmax(values)).tolist()
    if abs(least) < torch.inf and abs(greatest) < torch.inf:
        return Range(least, greatest, values.numel())
    num_nan, num_inf = torch.stack([values.isnan().sum(), values.isinf().sum()]).tolist()
    if num_nan + num_inf == values.numel():
        return Range(None, None, values.numel(), num_nan, num_inf)
    finite = values[values.isfinite()]
    return Range(float(finite.min()), float(finite.max()), values.numel(), num_nan, num_inf)


@torch.no_grad()
def bad_rows(tensor: Tensor) -> Tensor:
    """(n,) bool on the host, along the first dimension: where a value is not finite; (0,) of a single number."""
    if not tensor.dim():
        return torch.zeros(0, dtype=torch.bool)
    return (~_wide(tensor).isfinite()).flatten(1).any(1).cpu() if tensor.dim() > 1 else (~tensor.isfinite()).cpu()


def is_finite(tensor: Tensor) -> bool:
    """Of all its values; True for what holds no floating numbers."""
    found = range_of(tensor)
    return found is None or not found.num_not_finite


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dtype.itemsize >= 4 else tensor.detach().float()
