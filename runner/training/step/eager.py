"""Takes an epoch's steps one after the other, each by calls from the host: what choose.py takes by default.

Each step's values go into the metric buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from runner.data.loading.loaders import Batches
from runner.training.metric_buffer import MetricBuffer
from runner.training.schedule import Rates
from runner.training.step.train_step import Step


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
            self._rates.advance()
            yield 1


def _groups(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    iterator = iter(items)
    while group := tuple(islice(iterator, size)):
        yield group
