"""Takes an epoch's steps one after the other, each by calls from the host: what choose.py takes by default.

Each step's values go into the metric buffer. Rates has the schedule take its step, here and for on_device.py;
one that goes by a metric takes it in fit.py, at an epoch's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runner.data.loading.loaders import Batches
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import Turns
from runner.training.progress import Progress
from runner.training.step.train_step import Step


class Rates:
    """The learning rates of an optimizer, a schedule's or constant ones; the first group's are noted where they change.

    Of optimizers that take turns, those of each one's first group are noted with it, as train/lr_NAME.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: LRScheduler | None, *, buffer: MetricBuffer, progress: Progress
    ) -> None:
        self.optimizer, self.buffer, self.progress = optimizer, buffer, progress
        self._groups, self._schedule = optimizer.param_groups, schedule
        turns = optimizer.each if isinstance(optimizer, Turns) else {}
        self._of_turns = {f"train/lr_{name}": one.param_groups[0] for name, one in turns.items()}

    @property
    def are_scheduled(self) -> bool:
        """Whether a step may have other rates than the one before it."""
        return self._schedule is not None

    def note(self, *, ahead: int = 0) -> None:
        """Before a step is taken, `ahead` steps after the next one."""
        rate = self._groups[0]["lr"]
        if rate != self.progress.rate:
            self.progress.rate = float(rate)
            self.buffer.note("train/lr", self.progress.rate, ahead=ahead)
            for name, group in self._of_turns.items():
                self.buffer.note(name, float(group["lr"]), ahead=ahead)

    def go_on(self) -> None:
        """After a step was taken."""
        if self._schedule is not None:
            self._schedule.step()


class StepByStep:
    """Epochs whose every step is a call from the host. `step`: what takes one; clock.py has another one take its place."""

    def __init__(
        self, step: Step, batches: Batches, *, accumulate_steps: int, rates: Rates, buffer: MetricBuffer
    ) -> None:
        self.step, self._batches, self._size = step, batches, accumulate_steps
        self._rates, self._buffer = rates, buffer

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._batches.num_batches // self._size)

    def steps(self, epoch: int, *, first_step: int = 0) -> Iterator[int]:
        batches = self._batches.epoch(epoch, first_batch=first_step * self._size)
        for group in _groups(batches, self._size):
            self._rates.note()
            self._buffer.write(self.step(group))
            self._rates.go_on()
            yield 1


def _groups(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    iterator = iter(items)
    while group := tuple(islice(iterator, size)):
        yield group
