"""Computes features of points of the plane, (B, 2) to (B, features): squares, sines, ... For `playground`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import RunnerError, nearest

FEATURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x1": lambda x1, x2: x1,
    "x2": lambda x1, x2: x2,
    "x1_squared": lambda x1, x2: x1.square(),
    "x2_squared": lambda x1, x2: x2.square(),
    "x1_times_x2": lambda x1, x2: x1 * x2,
    "sin_x1": lambda x1, x2: x1.sin(),
    "sin_x2": lambda x1, x2: x2.sin(),
}


class Features(nn.Module):
    """A column for each name; a layer, so that whoever uses the model later gives it plain points."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = check_features(names, key="features")

    def forward(self, points: Tensor) -> Tensor:  # (B, 2) -> (B, features)
        x1, x2 = points.unbind(1)
        return torch.stack([FEATURES[name](x1, x2) for name in self.names], 1)


def check_features(names: Any, *, key: str) -> list[str]:
    """The names, if all are known. Raises: RunnerError with the nearest."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise RunnerError.suggest(f"{key}={names}", f"`{key}` must be a list of features", [f"{key}=[x1,x2]"])
    for name in names:
        if name not in FEATURES:
            hits = nearest(str(name), FEATURES) or FEATURES
            problem = f"there is no feature `{name}`; there are {', '.join(FEATURES)}"
            fix = f"use {' or '.join(f'`{hit}`' for hit in hits)} instead of `{name}`"
            raise RunnerError.of(f"{key}=[{','.join(map(str, names))}]", problem, fix)
    return list(names)
