"""What is trained and what with, built and placed: experiment/build.py makes it, everything that trains takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from runner.data.loading.loaders import Batches
from runner.data.source import Source
from runner.data.split import Splits
from runner.device.precision import Precision
from runner.models.card import Card
from runner.tasks.task import Task
from runner.training.optimizer import AveragedWeights
from runner.training.progress import Best
from runner.training.schedule import Schedule
from runner.training.stopping import Limits
from runner.training.view import Hook

if TYPE_CHECKING:
    from runner.distributed.sharding import Shards  # it imports for a second


@dataclass(frozen=True)
class Parts:
    """What the loop works with. Everything is on `device`."""

    device: torch.device
    source: Source
    splits: Splits
    residency: str  # where the data lies and why, in words
    train: Batches
    val: Batches | None
    test: Batches | None
    model: nn.Module
    weights: str  # what it starts from, in words; empty: drawn from the seed
    layout: str  # how its weights lie in memory, in words; empty: as torch makes them
    task: Task
    card: Card
    optimizer: Optimizer
    schedule: Schedule
    average: AveragedWeights | None
    precision: Precision
    limits: Limits
    best: Best
    hooks: tuple[Hook, ...] = ()
    shards: Shards | None = None  # of a model that lies in parts, one with each of several processes
    threads: str = ""  # that compute on the CPU, in words, where the work decides it

    @property
    def kept_model(self) -> nn.Module:
        """The model that is evaluated and kept: the averaged weights, where there are any."""
        return self.average.model if self.average else self.model

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())
