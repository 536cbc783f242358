"""Trains several members together: each has its own Training, and all take each step as one.

A member's evaluations, checkpoints, journal and end are those of a single run. The members share the step, the metric buffer
and the thread that copies its rows. A member that ends leaves the group, and the others continue.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch

from runner.config.settings import Settings
from runner.device import backends
from runner.device.backends import use_in_thread
from runner.device.placement import map_tensors, tensors
from runner.distributed.group import Alone
from runner.errors import OF_CODE, RunnerError, on_a_line
from runner.training.background import Background
from runner.training.fit import Training
from runner.training.loop import OwnStopCondition, StopCondition
from runner.training.metric_buffer import MetricBuffer, Window, check_finite
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.signals import Stop
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.stack import ModelStack
from runner.training.stacked.step import Members, StackedStep
from runner.training.step.clock import STEP, StepClock

#: seconds of steps between two checks whether the training ends
MOST_SECONDS = 0.3


@dataclass
class Member:
    """One of several trainings: its parts, its observer, and the states of its generators.

    lane: equal for members whose optimizers, schedules, clipping and averages have the same settings.
    """

    parts: Parts
    settings: Settings
    folder: Path
    observer: Observer
    lane: Hashable
    generators: Mapping[str, Any]


def fit_together(
    members: Sequence[Member],
    num_together: int,
    *,
    stop: Stop,
    say: Callable[[str], None],
    compiled: Compiled | None = None,
) -> list[Result]:
    """Train the members, see fit.fit(). Members that a kill left at different steps are trained one set after the other.

    Args:
        num_together: How many compute together, see size.py.
        say: Prints what concerns all members.
        compiled: The functions that check.py compiled for them; None: nothing is compiled.

    Returns:
        A result for each member. A member whose checkpoint can't be resumed fails, and the others don't.
    """
    results = [Result(best=member.parts.best) for member in members]
    runs = []
    for number, member in enumerate(members):
        try:
            runs.append(_MemberRun(member, number, stop))
        except RunnerError as error:
            results[number].error = on_a_line(error)
    for _, together in groupby(sorted(runs, key=_MemberRun.position), key=_MemberRun.position):
        _Group(list(together), num_together, stop=stop, say=say, compiled=compiled).train()
    for run in runs:
        results[run.number] = run.training.result
    return results


def same_answer_for_all(stop: StopCondition) -> StopCondition:
    """Call a stop condition once for each step, so that all members get the same answer."""
    return lru_cache(maxsize=2)(stop)


class _MemberRun:
    """A member's Training, and its column of the group's metric buffer (metric_buffer.MetricRows)."""

    def __init__(self, member: Member, number: int, stop: Stop) -> None:
        self.member, self.number = member, number
        # a rate that follows a metric falls by each member's own values
        self.lane = (member.lane, number) if member.parts.schedule.follows_metric else (member.lane, -1)
        self.step = self.pulls = 0
        self.ended_at = -1  # the step of its last point
        self.generators = dict(member.generators)
        self._state: dict[str, Any] = {"names": [], "rows": torch.empty(0), "notes": {}}
        self._group: _Group | None = None
        with self.own_generators():
            self.training = Training(
                member.parts,
                member.settings,
                member.folder,
                observer=member.observer,
                stop=stop,
                ranks=Alone(),
                rows=self,
            )

    @contextmanager
    def own_generators(self) -> Iterator[None]:
        """Draw random numbers as in this member's run."""
        with world(self.generators, self.member.parts.device):
            yield
            self.generators = backends.generator_states(self.member.parts.device)

    def position(self) -> tuple[int, int]:
        """Equal for members that take their steps together."""
        return self.training.progress.step, len(self._state["rows"])

    def join(self, group: _Group) -> None:
        self._group = group

    def advance(self, between_steps: Callable[[], str | None]) -> bool:
        """Do what is due between steps, which returns why the training ends. Returns whether it continues."""
        reason: str | None = "failed"
        with self.own_generators():
            with self.training.failures():
                reason = between_steps()
                if reason is not None:
                    self.training.end(reason)
            if reason is None:
                return True
            self.training.close()
        self._state, self._group = self.state(), None
        return False

    def begin(self, stop: StopCondition) -> str | None:
        self.training.begin(stop)
        return self.training.loop.begin()

    def after_steps(self, num: int, error: BaseException | None) -> str | None:
        """error: of the group's step."""
        if error is not None:
            raise error
        self.training.background.raise_error()
        loop = self.training.loop
        reason = loop.after_steps(num)
        return loop.end_of_epoch() if reason is None and loop.is_epoch_over else reason

    def pull(self, *, is_end: bool = True) -> None:
        if self._group is not None:
            self._group.pull(self, is_end=is_end)

    def state(self) -> dict[str, Any]:
        return self._state if self._group is None else self._group.state_of(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def skip(self, seconds: float) -> None:
        if self._group is not None:
            self._group.skip(seconds)

    def deliver(self, window: Window) -> None:
        """Report rows that were copied, in the background thread."""
        self.member.observer.window(window)
        check_finite(window)


class _Group:
    def __init__(
        self,
        runs: list[_MemberRun],
        num_together: int,
        *,
        stop: Stop,
        say: Callable[[str], None],
        compiled: Compiled | None,
    ) -> None:
        first = runs[0].member
        self._runs = sorted(runs, key=lambda run: str(run.lane))
        self._settings, self._limits, self._say = first.settings, first.parts.limits, say
        self._device = first.parts.device
        self._stop = same_answer_for_all(OwnStopCondition(stop, self._limits))
        self._background = Background(begin=partial(use_in_thread, self._device))
        self._batches: Iterator[Any] = iter(())
        self._batches_are_of: Any = None  # the members, the epoch, and the step in it
        known = max(run.training.progress.num_together for run in runs)  # of an earlier part: for identical results
        self._num_together, self._compiled = known or num_together, compiled
        if self._num_together != num_together:
            say(f"batch    {known} of {len(runs)} jobs compute together, as before, for bitwise identical results")
        self._buffer: MetricBuffer
        self._step: StackedStep
        self._columns: list[_MemberRun] = []
        self._pulls_before = 0
        self._steps_ended: float | None = None  # when the last steps were over; None: not waited for yet
        num_clocked, step = self._settings.train.clocked_steps, runs[0].training.progress.step
        self._clock = (
            StepClock(num_clocked, first=step, limits=self._limits, device=self._device) if num_clocked else None
        )

    def train(self) -> None:
        """Train until all members have ended."""
        try:
            self._form(self._runs)
            runs = [run for run in self._runs if run.advance(partial(run.begin, self._stop))]
            while runs:
                num, error = 0, None
                try:
                    if len(runs) != len(self._columns):
                        self._form(runs)
                    with backends.backward_in_this_thread():
                        num = self._take_steps()
                except OF_CODE as failed:
                    error = failed
                runs = [run for run in runs if run.advance(partial(run.after_steps, num, error))]
        finally:
            self._background.close()

    def _form(self, runs: list[_MemberRun]) -> None:
        """Stack the members and their unread rows."""
        states = [run.state() for run in runs]
        for run in runs:
            run.join(self)
        parts = [run.member.parts for run in runs]
        lanes = [list(same) for _, same in groupby(runs, key=lambda run: run.lane)]
        self._columns, self._lanes = runs, lanes
        if self._compiled:
            self._compiled.num_together = self._num_together
        self._step = StackedStep(
            ModelStack(parts, numbers=self._compiled.numbers if self._compiled else ()),
            [Members([run.member.parts for run in lane], lane[0].member.settings.train) for lane in lanes],
            num_pieces=-(-len(runs) // self._num_together),
            say=self._say,
            compiled=self._compiled,
        )
        metrics = self._settings.metrics
        if hasattr(self, "_buffer"):
            self._pulls_before += self._buffer.pulls
        self._buffer = MetricBuffer(
            self._device,
            self._deliver,
            background=self._background,
            pull_every=metrics.pull_every,
            every=metrics.every,
            watch="",  # each member checks its own
        )
        self._buffer.step = runs[0].step
        notes = {
            f"{run.number} {name}": points
            for run, state in zip(runs, states, strict=True)
            for name, points in state["notes"].items()
        }
        rows = torch.stack([state["rows"] for state in states], dim=-1)
        self._buffer.load_state({"names": states[0]["names"], "rows": rows, "notes": notes})

    def _take_steps(self) -> int:
        first = self._columns[0].training
        epoch, at, steps_per_epoch = first.progress.epoch, first.loop.step_in_epoch, first.steps_per_epoch
        num = min(steps_per_epoch - at, self._buffer.room, self._limits.room(first.progress.step))
        if self._batches_are_of != (self._columns, epoch, at):
            self._begin_batches(epoch, at)
        generators = [run.generators for run in self._columns]
        taken, began, self._steps_ended = 0, time.perf_counter(), None
        due = self._clock.due if self._clock is not None else sys.maxsize
        with self._step.drawing(generators):
            deadline = time.monotonic() + MOST_SECONDS
            while taken < num and (taken == 0 or time.monotonic() < deadline):
                self._note_rates()
                if self._buffer.step < due:
                    self._buffer.write(self._step.take(next(self._batches)))
                else:
                    due = self._take_clocked()
                self._step.move_rates()
                taken += 1
        seconds = time.perf_counter() - began
        self._num_together = self._step.num_together
        self._step.follow()
        self._batches_are_of = self._columns, epoch, at + taken
        for run in self._columns:
            run.training.progress.num_together = self._num_together
            run.step, run.pulls = run.step + taken, self._pulls_before + self._buffer.pulls
            run.training.step_seconds += seconds
            run.training.clock = self._clock
        return taken

    def _take_clocked(self) -> int:
        clock = self._clock
        assert clock is not None
        clock.begin()
        batches = next(self._batches)
        self._buffer.write(clock.part(STEP, self._step.take)(batches))
        clock.end(self._buffer.step, 1, is_first=False)
        return clock.due

    def _begin_batches(self, epoch: int, first_step: int) -> None:
        size = self._settings.train.accumulate_steps
        each = [run.member.parts.train.epoch(epoch, first_batch=first_step * size) for run in self._columns]
        together = map(stacked_batches, zip(*each, strict=True))
        self._batches = iter(lambda: tuple(islice(together, size)), ())

    def _note_rates(self) -> None:
        for lane in self._lanes:
            progress = lane[0].training.progress
            rate = lane[0].member.parts.optimizer.param_groups[0]["lr"]
            if rate == progress.rate:
                continue
            for run in lane:
                run.training.progress.rate = float(rate)
                self._buffer.note(f"{run.number} train/lr", float(rate))

    def state_of(self, run: _MemberRun) -> dict[str, Any]:
        """The rows that one member has written and not pulled, as its own buffer would have them.

        Its thread has all rows that were pulled, so what it writes next is not ahead of them.
        """
        self._background.wait()
        state = self._buffer.state()
        rows = state["rows"][..., self._columns.index(run)] if state["names"] else state["rows"]
        if run.ended_at == run.step:  # its rows are reported; those of the others stay
            return {"names": state["names"], "rows": rows[:0], "notes": {}}
        return {"names": state["names"], "rows": rows, "notes": _notes_of(state["notes"], run.number)}

    def pull(self, run: _MemberRun, *, is_end: bool) -> None:
        """Copy all members' rows to the host; returns when their own threads have them."""
        self._buffer.pull(is_end=False)
        self._background.wait()
        run.pulls = self._pulls_before + self._buffer.pulls
        if run in self._columns and is_end and run.ended_at != run.step:
            self._deliver_last(run)

    def skip(self, seconds: float) -> None:
        self._buffer.skip(seconds)

    def _deliver_last(self, run: _MemberRun) -> None:
        state = self.state_of(run)
        run.ended_at = run.step
        rows = state["rows"].detach().to("cpu", copy=True)
        if not len(rows):
            return
        if self._steps_ended is None:  # else another member ended here before, and its test is not step time
            self._steps_ended = time.perf_counter()
        means, seconds = rows.mean(0, keepdim=True).numpy(), self._steps_ended - self._buffer.seen_until
        steps, times = torch.tensor([run.step]).numpy(), torch.tensor([int(time.time() * 1000)]).numpy()
        window = Window(tuple(state["names"]), steps, means, times, seconds, len(rows), state["notes"])
        run.training.background.put(partial(run.deliver, window))

    def _deliver(self, window: Window) -> None:
        for column, run in enumerate(self._columns):
            values, notes = window.values[..., column], _notes_of(window.notes, run.number)
            own = Window(window.names, window.steps, values, window.times_ms, window.seconds, window.num_steps, notes)
            run.training.background.put(partial(run.deliver, own))


@contextmanager
def world(generators: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """Set the process's generators to these states in the block, and back afterwards."""
    before = backends.generator_states(device)
    backends.set_generator_states(generators, device)
    try:
        yield
    finally:
        backends.set_generator_states(before, device)


def _notes_of(notes: Mapping[str, list[tuple[int, float]]], number: int) -> dict[str, list[tuple[int, float]]]:
    prefix = f"{number} "
    return {name.removeprefix(prefix): points for name, points in notes.items() if name.startswith(prefix)}


def stacked_batches(batches: Sequence[Any]) -> Any:
    """One batch of all members, whose tensors are (M, B, ...), from a batch of each."""
    columns = iter(zip(*(tensors(batch) for batch in batches), strict=True))
    return map_tensors(batches[0], lambda _: torch.stack(next(columns)))
