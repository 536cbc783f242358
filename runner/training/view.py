"""What a hook is, and what it sees of a training. Made by hooks.Hooks, for a person's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.data.loading.loaders import Batches


@dataclass(frozen=True)
class View:
    """What a hook sees of a training. It is to be looked at: a weight that a hook changes is changed.

    when: start, epoch or end. model: in eval mode, without gradients; at the end with the best weights. epoch, step: done
    so far. values: what was measured last, by name. folder: the run's.
    """

    when: str
    model: nn.Module
    device: torch.device
    epoch: int
    step: int
    values: dict[str, float]
    folder: Path
    _splits: Mapping[str, Batches | None] = field(repr=False)

    def batches(self, split: str = "val") -> Iterator[Any]:
        """The batches of `val` or `test` on the device, in order. Raises: ValueError for a split that is not there."""
        found = self._splits.get(split)
        if found is None:
            there = [name for name, batches in self._splits.items() if batches is not None]
            raise ValueError(f"a hook has the batches of {' and '.join(there) or 'no split'}, not of {split}")
        return iter(found.epoch(0))


@dataclass(frozen=True)
class Hook:
    """A function of train.hooks, with its arguments."""

    name: str
    call: Callable[[View], Any]
    at: tuple[str, ...] = ("epoch",)
