"""Who receives a training's values and messages: experiment/session.py, or nothing in processes other than the first."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from runner.training.hooks import HookValues
from runner.training.metric_buffer import Window


class Trial(Protocol):
    """A search's view of a run that trains."""

    metric: str

    def gives_up(self, value: float, epoch: int) -> bool:
        """Take the metric's value of an epoch; True if the search ends this trial."""
        ...


@dataclass(frozen=True)
class EpochEnd:
    """An evaluation: its values, and after which epoch and step."""

    epoch: int
    step: int
    values: Mapping[str, float]
    is_best: bool
    reached: str = ""  # the condition that ends the training


class Observer:
    """Receives values and messages; this one shows and stores nothing.

    The background thread calls window(), values(), shown(), epoch() and settle().
    """

    trial: Trial | None = None  # None: the run is not part of a search
    metrics: Mapping[str, float] = MappingProxyType({})  # the last value of each metric

    def window(self, window: Window) -> None:
        """Receive the training's rows since the last window."""

    def values(self, values: Mapping[str, float], *, step: int, time_ms: int) -> None:
        """Receive the values of a whole split, or of hooks."""

    def shown(self, shown: HookValues, *, step: int, time_ms: int) -> None:
        """Receive images and tables of hooks."""

    def settle(self) -> None:
        """Write what was received to the disk."""

    def means(self) -> dict[str, float]:
        """The means over the training's rows since the last call."""
        return {}

    def epoch(self, end: EpochEnd) -> None:
        """Show an epoch's values, after the window of its last step."""

    def progress(self, *, num_steps: int, num_epochs: int) -> AbstractContextManager[None]:
        """Show the training's progress in the block."""
        return nullcontext()

    def say(self, text: str) -> None:
        """Print a line."""
