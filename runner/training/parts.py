"""The parts of a training, built by experiment/build.py and placed on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.data.loading.loaders import Batches
from runner.data.source import Source
from runner.data.split import Splits
from runner.device.precision import Precision
from runner.models.card import Card
from runner.tasks.task import Task
from runner.training.carried_state import CarriedState
from runner.training.loop import Best
from runner.training.optimizer import AveragedWeights
from runner.training.schedule import Schedule
from runner.training.stopping import Limits

if TYPE_CHECKING:
    from runner.distributed.sharding import Shards  # it imports for a second


@dataclass(frozen=True)
class Hook:
    """A function of train.hooks, called with a hooks.View, and its arguments."""

    name: str
    call: Callable[[Any], Any]
    at: tuple[str, ...] = ("epoch",)


@dataclass(frozen=True)
class Parts:
    """What a training works with. Everything is on `device`. The texts are for the run's lines."""

    device: torch.device
    source: Source
    splits: Splits
    residency: str  # text: where the data is and why
    train: Batches
    val: Batches | None
    test: Batches | None
    model: nn.Module
    weights: str  # text: of which checkpoint; empty: drawn from the seed
    layout: str  # text: the memory format; empty: torch's default
    task: Task
    card: Card
    optimizer: Optimizer
    schedule: Schedule
    average: AveragedWeights | None
    precision: Precision
    limits: Limits
    best: Best
    carried: CarriedState
    hooks: tuple[Hook, ...] = ()
    shards: Shards | None = None  # of a model that is split across processes
    threads: str = ""  # text: CPU threads, if the amount of work decides their number

    @property
    def kept_model(self) -> nn.Module:
        """The model that is evaluated and saved: the averaged weights, if there are any."""
        return self.average.model if self.average else self.model

    @property
    def loaders(self) -> list[Batches]:
        """The batches of all splits."""
        return [each for each in (self.train, self.val, self.test) if each is not None]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
