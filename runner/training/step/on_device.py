"""Takes several steps at a time without the host in between, with data that are on the device.

For train.cuda_graph (GraphSteps), and train.compile on a CPU (CompiledSteps). The position in the epoch's order and the rates
are on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runner.data.loading.batches import sent
from runner.errors import RunnerError
from runner.training.schedule import Rates
from runner.training.step.fused_update import CannotTraceError, FixedUpdate
from runner.training.step.train_step import EagerSteps, Step
from runner.training.stopping import Limits

#: the maximum number of steps at a time: their numbers are on the device
MAX_AT_ONCE = 64

Sizes = tuple[int, ...]  # the examples in each batch of a step


@dataclass(frozen=True)
class Compiling:
    """How a step is compiled."""

    fixed_shapes: bool = True  # batches differ only in their number of examples: a function for each number
    usual_rows: int | None = None  # steps whose last batch has another size are rare, and eager; None: all are compiled
    in_part: str = ""  # why the step can't be one function, if that is known before
    keeps_layout: bool = False  # torch may not use channels last

    @property
    def options(self) -> dict[str, Any] | None:
        return {"layout_optimization": False} if self.keeps_layout else None


class Repeater(Protocol):
    """Repeats steps without the host: GraphSteps or CompiledSteps."""

    is_required: bool  # whether a step that can't be repeated is an error
    most_calls: int  # with numbers that are copied together

    def at_once(self, sizes: Sizes, room: int) -> int:
        """How many of the next `room` steps of these sizes a call takes."""

    def take(self, steps: OnDevice, sizes: Sizes, num: int) -> None:
        """Take them. Raises: CannotTraceError, before anything has changed."""


class OnDevice:
    """Takes steps that read from the device what changes between them.

    This is the epoch's order and the position in it, the rates, and the row of the metric buffer.

    Steps are eager until the optimizer has its state, and if their size is rare.

    Args:
        make: train_step.make_step of the run, which takes StepOptions by name.
        first: An eager step, with the guard.
        one_by_one: The steps of a split on the device. It takes those that can't be repeated, unless they must be.
        limits: Steps that are taken at once end there.
        kind: How steps are compiled; None: they are not.
    """

    def __init__(
        self,
        make: Callable[..., Step],
        first: Step,
        one_by_one: EagerSteps,
        *,
        repeater: Repeater,
        limits: Limits,
        kind: Compiling | None = None,
    ) -> None:
        batches: Any = one_by_one.batches
        data, rates = batches.indexed(), one_by_one.rates
        assert isinstance(rates, Rates)
        self._make, self._data, self._rates, self._limits, self._kind = make, data, rates, limits, kind
        self._first = self._step = first
        self._one_by_one, self._repeater = one_by_one, repeater
        self._optimizer, self._buffer, self._progress = rates.optimizer, rates.buffer, rates.progress
        self._device = device = rates.buffer.device
        num_rows, batch_size, accumulate_steps = batches.num_rows, batches.batch_size, one_by_one.accumulate_steps
        self._rows_a_step = batch_size * accumulate_steps
        self._num_usual, rest = divmod(num_rows, self._rows_a_step)
        self._usual = (batch_size,) * accumulate_steps
        self._last = tuple(min(batch_size, rest - start) for start in range(0, rest, batch_size))
        self._offsets = torch.arange(min(self._rows_a_step * MAX_AT_ONCE, num_rows), device=device)
        # of the next step's first example in the order
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._table = torch.empty(0)  # (MAX_AT_ONCE, G, K) numbers of the next steps, see FixedUpdate
        self._now = self._table  # the numbers that steps read: the table, or a part of it
        self._now_rows: list[Tensor] = []  # views
        self._gathers_before = device.type == "cpu" and data.has_images
        self._gathered: dict[Sizes, Any] = {}  # the examples of one step, always in the same memory
        self._sent: list[list[list[float]]] = []
        self._fixed_at = 0  # the step after which the update was fixed
        self._is_eager = False  # steps can't be repeated
        self._update: FixedUpdate | None = None

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        """See loop.Epochs. Raises: RunnerError for a step that can't be repeated, if it must be."""
        at = first_step
        if not self._is_eager:
            self._data.begin(number)
            self._position.fill_(at * self._rows_a_step)
        while not self._is_eager and at < self._num_usual + bool(self._last):
            sizes, alike = (self._usual, self._num_usual - at) if at < self._num_usual else (self._last, 1)
            room = min(alike, self._buffer.room, self._limits.room(self._progress.step), MAX_AT_ONCE)
            try:
                num = self._take(sizes, room)
            except CannotTraceError as error:
                if self._repeater.is_required:
                    raise self._refused(error) from error
                self._is_eager = True
                break
            self._buffer.wrote(num)
            at += num
            yield num
        if self._is_eager:
            yield from self._one_by_one.epoch(number, first_step=at)

    def _take(self, sizes: Sizes, room: int) -> int:
        if self._update is None and (self._progress.step or self._optimizer.state) and self._buffer.writes_on_device():
            self._fix_update()
        is_rare = self._kind is not None and self._kind.usual_rows not in (None, sizes[-1])
        if self._update is None or is_rare:
            self._take_eagerly(sizes)
            return 1
        num = self._repeater.at_once(sizes, room)
        most_calls = self._repeater.most_calls if self._now is not self._table else 1
        num_steps = num * min(most_calls, room // num) if num > 1 else 1
        self._bring_numbers(num_steps)
        for at in range(0, num_steps, num):
            if self._now is not self._table:
                self._now[:num].copy_(self._table[at : at + num])
            self._repeater.take(self, sizes, num)
        self._rates.advance()
        return num_steps

    def _take_eagerly(self, sizes: Sizes) -> None:
        self._rates.note()
        with self._rounded_rates():
            values = self._first(self._batches(sizes, 1)[0])
        self._buffer.write_on_device([values])
        self._rates.advance()

    def take(self, sizes: Sizes, num: int) -> None:
        """Take `num` steps from the current position, with the table's first numbers."""
        update = self._update
        assert update is not None
        own, values = update.numbers, []
        for index, batches in enumerate(self._batches(sizes, num)):
            update.numbers = self._now_rows[index]  # without a copy
            values.append(self._step(batches))
        update.numbers = own
        self._buffer.write_on_device(values)

    def prepare(self, sizes: Sizes, index: int) -> None:
        """Copy the inputs of take_one(), for step `index` of those that are taken at once.

        On a CPU compiled code is slow at indexing numbers, and at gathering images pixel by pixel.
        """
        assert self._update is not None
        self._update.numbers.copy_(self._now_rows[index])
        if self._gathers_before:
            self._gathered[sizes] = self._gather(sizes, 1, out=self._gathered.get(sizes))

    def take_one(self, sizes: Sizes) -> None:
        """Take one step, after prepare()."""
        gathered = self._gathered[sizes] if self._gathers_before else self._gather(sizes, 1)
        self._buffer.write_on_device([self._step(self._data.batches(gathered, sizes))])

    def _gather(self, sizes: Sizes, num: int, *, out: Any = None) -> Any:
        rows = sum(sizes) * num
        gathered = self._data.gather(self._offsets[:rows] + self._position, out=out)
        self._position.add_(rows)
        return gathered

    def _batches(self, sizes: Sizes, num: int) -> list[list[Any]]:
        is_aligned = all(self._data.is_aligned(size) for size in sizes)
        at_once = num if is_aligned and self._data.most_at_once(sum(sizes)) >= num else 1
        steps = []
        for _ in range(0, num, at_once):
            batches = self._data.batches(self._gather(sizes, at_once), sizes * at_once)
            steps += [batches[at : at + len(sizes)] for at in range(0, len(batches), len(sizes))]
        return steps

    def _bring_numbers(self, num: int) -> None:
        """Note the rates of the next steps, and write their numbers to the table if they changed.

        Raises: CannotTraceError if the next step has another setting; RunnerError if a later one has, as the schedule has
        advanced then.
        """
        assert self._update is not None
        numbers: list[list[list[float]]] = []
        since = self._progress.step - self._fixed_at + 1
        alike = 1 if self._rates.are_scheduled else num
        for ahead in range(0, num, alike):
            if ahead:
                self._rates.advance()
            try:
                numbers += self._update.ahead(since + ahead, alike)
            except CannotTraceError as error:
                if ahead:
                    raise self._refused(error) from error
                raise
            self._rates.note(ahead=ahead)
        if numbers != self._sent[:num]:
            self._sent = numbers
            self._table[:num].copy_(sent(torch.tensor(numbers, dtype=self._table.dtype), self._device))

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
        """Called when the optimizer has its state: after the first step, or in a resumed run."""
        self._update = FixedUpdate(self._optimizer, as_formula=self._kind is not None)
        self._step = self._make(update=self._update)
        self._fixed_at = self._progress.step
        self._table = self._update.numbers.repeat(MAX_AT_ONCE, 1, 1)
        has_parts = self._repeater.most_calls > 1 and self._rates.are_scheduled
        self._now = self._table.clone() if has_parts else self._table
        self._now_rows = list(self._now)

    def _refused(self, error: CannotTraceError) -> RunnerError:
        key = "train.cuda_graph" if self._repeater.is_required else "train.compile"
        fix = f"{error.fix}, or " if error.fix else ""
        return RunnerError.of(f"{key}=true", str(error), f"use {fix}`{key}=false`")


def host_generators(device: torch.device) -> dict[str, Any]:
    """The states of the host's generators by name, which a repeated step must not use."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "NumPy's random": (kind, np.asarray(keys).tobytes(), *rest),
    }
    if device.type != "cpu":
        states["torch's CPU generator"] = torch.get_rng_state().numpy().tobytes()
    return states
