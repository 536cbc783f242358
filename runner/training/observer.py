"""Defines what a training tells while it lasts, and whom: experiment/session.py, or nobody in the processes beside the first."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from runner.training.hook_values import Shown
from runner.training.metric_buffer import Window


class Trial(Protocol):
    """A search's view of a run that trains."""

    metric: str

    def gives_up(self, value: float, epoch: int) -> bool:
        """Takes the metric's value at an epoch's end; True when it is not worth going on."""
        ...


class Observer(Protocol):
    """Receives values and messages. window(), values(), shown(), epoch() and settle() are called in the background thread."""

    @property
    def trial(self) -> Trial | None:
        """None: no search asks whether the run goes on."""
        ...

    def window(self, window: Window) -> None:
        """The training's rows since the last window."""
        ...

    def values(self, values: Mapping[str, float], *, step: int, time_ms: int) -> None:
        """The values of a whole split."""
        ...

    def shown(self, shown: Shown, *, step: int, time_ms: int) -> None:
        """Images and tables of hooks."""
        ...

    def settle(self) -> None:
        """Brings to the disk what it was told."""
        ...

    def means(self) -> dict[str, float]:
        """The means over the training's rows since the last call."""
        ...

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_best: bool) -> None:
        """Show an epoch's values, after the window of its last step. is_best: whether they are the best so far."""
        ...

    def progress(self, *, num_steps: int, num_epochs: int) -> AbstractContextManager[None]:
        """Shows how far the training is, while it lasts."""
        ...

    def say(self, text: str) -> None:
        """One line, for who looks on."""
        ...


class SilentObserver:
    """Of the processes beside the first one, which tells what all have measured."""

    trial = None

    def window(self, window: Window) -> None:
        pass

    def values(self, values: Mapping[str, float], *, step: int, time_ms: int) -> None:
        pass

    def shown(self, shown: Shown, *, step: int, time_ms: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def means(self) -> dict[str, float]:
        return {}

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_best: bool) -> None:
        pass

    def progress(self, *, num_steps: int, num_epochs: int) -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, text: str) -> None:
        pass
