"""Takes an epoch's steps several at a time, from a set that lies on the device; between them it needs nothing of the host.

For train.cuda_graph, and train.compile on a CPU. It keeps on the device the place in the epoch's order, and the rates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runner.data.loading.loaders import Batches
from runner.data.loading.resident import sent
from runner.errors import Problem, RunnerError
from runner.training.schedule import Rates
from runner.training.step.fused_update import CannotTraceError, FixedUpdate
from runner.training.step.train_step import Step
from runner.training.stopping import Limits

#: steps whose numbers lie on the device: no more are taken at a time
MOST_AT_ONCE = 64

Sizes = tuple[int, ...]  # rows of the batches of one step
Epochs = Any  # loop.Epochs


class Steps(Protocol):
    """What is repeated: steps from where the device is."""

    def take(self, sizes: Sizes, num: int) -> None:
        """`num` steps, one after the other, with the numbers of the table's first steps."""

    def prepare(self, sizes: Sizes, index: int) -> None:
        """Brings what take_one() reads to where it reads it, for step `index` of those that are taken at once."""

    def take_one(self, sizes: Sizes) -> None:
        """One step, after prepare()."""


class Repeater(Protocol):
    """Takes steps again and again without the host's part in them: CUDA graphs, or a compiled step."""

    def at_once(self, sizes: Sizes, room: int) -> int:
        """How many of the next `room` steps of these sizes to take at once."""

    def take(self, sizes: Sizes, num: int) -> None:
        """Takes them. Raises: CannotTraceError, before anything has changed, where they can't be."""


@dataclass(frozen=True)
class Repeating:
    """How steps are repeated, and what is done where they can't be.

    repeater: what takes several steps at once, made from them. as_formula: see FixedUpdate.
    usual_rows: of a step's last batch where others are rare (None: no size is). times: how often what it takes at once is
    taken with numbers that came over together, of rates that move.
    instead: takes the steps where a repeater can't (None: that is an error, of a graph that was asked for).
    """

    repeater: Callable[[Steps], Repeater]
    as_formula: bool = False
    usual_rows: int | None = None
    times: int = 1
    instead: Epochs | None = None


class OnDevice:
    """Epochs whose steps read all that changes from step to step on the device: the epoch's order and the place in it, the
    rates, the row of the metric buffer.

    Steps before the optimizer has its state, and those of rare sizes, are taken as they are written.

    make: the run's train_step.make_step, with options by their names; first: what it makes, with the guard on it.
    """

    def __init__(
        self,
        make: Callable[..., Step],
        batches: Batches,
        *,
        first: Step,
        accumulate_steps: int,
        rates: Rates,
        limits: Limits,
        how: Repeating,
    ) -> None:
        """batches: of a split that lies on the device. limits: which no steps that are taken at once may pass by."""
        data = batches.indexed()
        assert data is not None
        self._make, self._data, self._rates, self._limits = make, data, rates, limits
        self._as_formula, self._usual_rows, self._instead = how.as_formula, how.usual_rows, how.instead
        self._optimizer, self._buffer, self._progress = rates.optimizer, rates.buffer, rates.progress
        self._device = device = rates.buffer.device
        num_rows, batch_size = batches.num_rows, batches.batch_size
        sizes = [min(batch_size, num_rows - start) for start in range(0, num_rows, batch_size)]
        self._steps = [tuple(sizes[at : at + accumulate_steps]) for at in range(0, len(sizes), accumulate_steps)]
        self._num_alike = self._steps.count(self._steps[0])  # all but a smaller last one
        self._rows_a_step = batch_size * accumulate_steps
        self._places = torch.arange(min(self._rows_a_step * MOST_AT_ONCE, num_rows), device=device)
        self._place = torch.zeros((), dtype=torch.int64, device=device)  # of the next step's first row in the order
        self._times = how.times
        self._table = torch.empty(0)  # (MOST_AT_ONCE, G, K) numbers of the steps to come, see FixedUpdate
        self._now = self._table  # those that are read: the same, or a part of them at a time
        self._table_rows: list[Tensor] = []  # its views, made once
        self._gathers_before = device.type == "cpu" and data.has_images
        self._gathered: dict[Sizes, Any] = {}  # the rows of one step, always in the same memory
        self._sent: list[list[list[float]]] = []
        self._fixed_at = 0  # the step after which the update was fixed
        self._is_left = False  # for what is there instead
        self._update: FixedUpdate | None = None
        self._first = self._step = first
        self._repeater = how.repeater(self)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._steps)

    def steps(self, epoch: int, *, first_step: int = 0) -> Iterator[int]:
        """See loop.Epochs. Raises: RunnerError for a step that can't be repeated, where there is nothing instead."""
        at = first_step
        if not self._is_left:
            self._data.begin(epoch)
            self._place.fill_(at * self._rows_a_step)
        while not self._is_left and at < len(self._steps):
            sizes = self._steps[at]
            alike = self._num_alike - at if sizes == self._steps[0] else 1
            room = min(alike, self._buffer.room, self._limits.room(self._progress.step), MOST_AT_ONCE)
            try:
                num = self._take(sizes, room)
            except CannotTraceError as error:
                if self._instead is None:
                    raise self._refused(error) from error
                self._is_left = True
                break
            self._buffer.wrote(num)
            at += num
            yield num
        if self._is_left and self._instead is not None:
            yield from self._instead.steps(epoch, first_step=at)

    def _take(self, sizes: Sizes, room: int) -> int:
        if self._update is None and (self._progress.step or self._optimizer.state) and self._buffer.writes_on_device():
            self._fix_update()
        is_rare = self._usual_rows is not None and sizes[-1] != self._usual_rows
        if self._update is None or is_rare:
            self._take_as_written(sizes)
            return 1
        num = self._repeater.at_once(sizes, room)
        times = min(self._times, room // num) if num > 1 else 1
        fit, is_past_them = self._bring_numbers(num * times)
        with self._update.settings_as_fixed() if is_past_them else nullcontext():
            for at in range(0, fit, num):
                some = min(num, fit - at)
                if self._now is not self._table:
                    self._now[:some].copy_(self._table[at : at + some])
                self._repeater.take(sizes, some)
        if not is_past_them:
            self._rates.advance()
        return fit

    def _take_as_written(self, sizes: Sizes) -> None:
        self._rates.note()
        with self._rounded_rates():
            values = self._first(self._batches(sizes, 1)[0])
        self._buffer.write_on_device([values])
        self._rates.advance()

    def take(self, sizes: Sizes, num: int) -> None:
        """See Steps."""
        update = self._update
        assert update is not None
        own, values = update.numbers, []
        for index, batches in enumerate(self._batches(sizes, num)):
            update.numbers = self._table_rows[index]  # read where it lies: no copy
            values.append(self._step(batches))
        update.numbers = own
        self._buffer.write_on_device(values)

    def prepare(self, sizes: Sizes, index: int) -> None:
        """See Steps. By a copy, as a compiled loop that looks its numbers up by an index is slow (57 us for 44, of 9,610
        weights). And images are gathered here on a CPU: what is compiled of that goes pixel by pixel (1.6 ms of a step with
        128 of 32x32, for 0.2; of rows of 64 numbers 12 us, for 40 with the calls from here; torch 2.13, 2026-11)."""
        assert self._update is not None
        self._update.numbers.copy_(self._table_rows[index])
        if self._gathers_before:
            self._gathered[sizes] = self._gather(sizes, 1, out=self._gathered.get(sizes))

    def take_one(self, sizes: Sizes) -> None:
        """See Steps."""
        gathered = self._gathered[sizes] if self._gathers_before else self._gather(sizes, 1)
        self._buffer.write_on_device([self._step(self._data.batches(gathered, sizes))])

    def _gather(self, sizes: Sizes, num: int, *, out: Any = None) -> Any:
        rows = sum(sizes) * num
        gathered = self._data.gather(self._places[:rows] + self._place, out=out)
        self._place.add_(rows)
        return gathered

    def _batches(self, sizes: Sizes, num: int) -> list[list[Any]]:
        is_aligned = all(self._data.is_aligned(size) for size in sizes)
        at_once = num if is_aligned and self._data.most_at_once(sum(sizes)) >= num else 1
        steps = []
        for _ in range(0, num, at_once):
            found = self._data.batches(self._gather(sizes, at_once), sizes * at_once)
            steps += [found[at : at + len(sizes)] for at in range(0, len(found), len(sizes))]
        return steps

    def _bring_numbers(self, num: int) -> tuple[int, bool]:
        """Notes the rates of the next steps, and writes their numbers to the table if they are others. Returns for how many
        it did so, and whether the schedule is past them: it is at the last of them, or, where it has moved something that is
        no rate for the step after it, there.

        Raises: CannotTraceError where it has for the next step.
        """
        assert self._update is not None
        numbers: list[list[list[float]]] = []
        since = self._progress.step - self._fixed_at + 1
        # steps with the same rates are asked for together: one by one it is 5 us of a step of 150 (2026-11)
        alike = 1 if self._rates.are_scheduled else num
        is_past_them = False
        for ahead in range(0, num, alike):
            if ahead:
                self._rates.advance()
            try:
                numbers += self._update.ahead(since + ahead, alike)
            except CannotTraceError:
                if not ahead:
                    raise
                is_past_them = True  # a schedule takes no step back, so the steps that it is ahead are taken first
                break
            self._rates.note(ahead=ahead)
        fit = len(numbers)
        if numbers != self._sent[:fit]:
            self._sent = numbers
            self._table[:fit].copy_(sent(torch.tensor(numbers, dtype=self._table.dtype), self._device))
        return fit, is_past_them

    @contextmanager
    def _rounded_rates(self) -> Iterator[None]:
        groups = self._optimizer.param_groups if self._device.type != "cpu" else []
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = float(np.float32(group["lr"]))
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _fix_update(self) -> None:
        """Once the optimizer has its state, after the first step; in a run that goes on it is there.

        Raises: CannotTraceError for an optimizer that takes its steps itself."""
        self._update = FixedUpdate(self._optimizer, as_formula=self._as_formula)
        self._step = self._make(update=self._update)
        self._fixed_at = self._progress.step
        self._table = self._update.numbers.repeat(MOST_AT_ONCE, 1, 1)
        self._now = self._table if self._times == 1 else self._table.clone()
        self._table_rows = list(self._now)

    def _refused(self, error: CannotTraceError) -> RunnerError:
        fix = f"{error.fix}, or " if error.fix else ""
        return RunnerError(Problem("train.cuda_graph=true", str(error), f"{fix}train.cuda_graph=false"))


def host_generators(device: torch.device) -> dict[str, Any]:
    """By name, the state of each generator that a step on the device has no part in, so that nothing in it may draw from it."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "NumPy's random": (kind, np.asarray(keys).tobytes(), *rest),
    }
    if device.type != "cpu":
        states["torch's CPU generator"] = torch.get_rng_state().numpy().tobytes()
    return states
