"""Trains several members together: each has its own Training, and a group takes each step as one.

A member's evaluations, checkpoints, journal and end are those of a single run. A group has the loop and the steps of a single
run (loop.train, EagerSteps), with values (M,), and its metric buffer. A member that ends leaves the group, and the others
continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import torch

from runner.config.settings import Settings
from runner.device import backends
from runner.device.backends import use_in_thread
from runner.device.placement import map_tensors, tensors
from runner.distributed.group import Alone
from runner.errors import OF_CODE, RunnerError, on_a_line
from runner.training.background import Background
from runner.training.carried_state import reset_state
from runner.training.fit import Training, fit
from runner.training.loop import Epochs, Loop, train
from runner.training.metric_buffer import MetricBuffer, Window, check_finite
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.signals import Stop
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.stack import ModelStack
from runner.training.stacked.step import StackedGradients, make_stacked_step
from runner.training.stacked.update import Lane
from runner.training.step.clock import STEP, ClockedEpochs, StepClock
from runner.training.step.train_step import EagerSteps
from runner.training.stopping import OwnStopCondition, StopCondition

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
    """Train the members, see fit.fit(), in groups of `num_together`, one group after the other.

    Members that a kill left at different steps are in different groups.

    Args:
        num_together: How many compute together, see size.py. 1: each member is trained as a single run.
        say: Prints what concerns all members.
        compiled: The functions that check.py compiled for them; None: nothing is compiled.

    Returns:
        A result for each member. A member whose checkpoint can't be resumed fails, and the others don't.
    """
    results = [Result(best=member.parts.best) for member in members]
    runs = []
    for number, member in enumerate(members):
        try:
            if num_together == 1:
                results[number] = _fit_one(member, stop)
            else:
                runs.append(_MemberRun(member, number, stop))
        except RunnerError as error:
            results[number].error = on_a_line(error)
    if compiled:
        compiled.say = say
    groups = []
    for _, same in groupby(sorted(runs, key=_MemberRun.position), key=_MemberRun.position):
        alike = sorted(same, key=lambda run: str(run.lane))
        groups += [alike[at : at + num_together] for at in range(0, len(alike), num_together)]
    while groups:
        group = _Group(groups.pop(0), stop=stop, compiled=compiled)
        if halves := group.train():
            say(f"out of memory: {len(halves[0])} of {sum(map(len, halves))} members at a time now")
            groups = [*halves, *groups]
    for run in runs:
        results[run.number] = run.training.result
    return results


def _fit_one(member: Member, stop: Stop) -> Result:
    parts, settings, folder = member.parts, member.settings, member.folder
    with world(member.generators, parts.device):
        return fit(parts, settings, folder, observer=member.observer, stop=stop, ranks=Alone())


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
        self.is_new = True
        self.generators = dict(member.generators)
        self._state: dict[str, Any] = {"names": [], "rows": torch.empty(0), "notes": {}}
        self._group: _Group | None = None
        with self._own_generators():
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
    def _own_generators(self) -> Iterator[None]:
        """Draw random numbers as in this member's run."""
        with world(self.generators, self.member.parts.device):
            yield
            self.generators = backends.generator_states(self.member.parts.device)

    def position(self) -> tuple[int, int]:
        """Equal for members that take their steps together."""
        return self.training.progress.step, len(self._state["rows"])

    def join(self, group: _Group) -> None:
        self._group = group

    def leave(self) -> None:
        """Keep the unread rows."""
        self._state, self._group = self.state(), None

    def goes_on(self, between_steps: Callable[[_MemberRun], str | None]) -> bool:
        """Do what is due between steps, which returns why the training ends. Returns whether it continues."""
        reason: str | None = "failed"
        with self._own_generators():
            with self.training.failures():
                reason = between_steps(self)
                if reason is not None:
                    self.training.end(reason)
            if reason is None:
                return True
            self.training.close()
        self.leave()
        return False

    def pull(self, *, is_end: bool = True) -> None:
        if self._group is not None:
            self._group.pull(self, is_end=is_end)

    def state(self) -> dict[str, Any]:
        return self._state if self._group is None else self._group.state_of(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def skip(self, seconds: float) -> None:
        if self._group is not None:
            self._group.buffer.skip(seconds)

    def deliver(self, window: Window) -> None:
        """Report rows that were copied, in the background thread."""
        self.member.observer.window(window)
        check_finite(window)


class _Group:
    """Members that take their steps together: their loop, see loop.Decisions, and their steps, see loop.Epochs."""

    buffer: MetricBuffer

    def __init__(self, runs: list[_MemberRun], *, stop: Stop, compiled: Compiled | None) -> None:
        first = runs[0].member
        self._runs, self._compiled = runs, compiled
        self._settings, self._limits, self._device = first.settings, first.parts.limits, first.parts.device
        self._stop = same_answer_for_all(OwnStopCondition(stop, self._limits))
        self._background = Background(begin=partial(use_in_thread, self._device))
        self._columns: list[_MemberRun] = []  # of the buffer
        self._pulls_before = self._num_unreported = 0  # steps that the members don't know of
        self._steps_ended: float | None = None  # when the last steps were over; None: not waited for yet
        self._clock: StepClock | None = None
        if num_clocked := self._settings.train.clocked_steps:
            step = runs[0].training.progress.step
            self._clock = StepClock(num_clocked, first=step, limits=self._limits, device=self._device)

    def train(self) -> list[list[_MemberRun]]:
        """Train until all members have ended. Returns two halves, to be trained instead, if memory ends."""
        error, is_too_large = None, False
        try:
            train(self, self, begin_epoch=self._reset_states)
        except OF_CODE as failed:  # it keeps the activations alive
            is_too_large = backends.is_out_of_memory(failed) and len(self._runs) > 1
            error = None if is_too_large else failed
        try:
            if error is not None:
                self._each(partial(_fail, error=error))
            return self._halves() if is_too_large else []
        finally:
            self._background.close()

    def _halves(self) -> list[list[_MemberRun]]:
        if self._num_unreported:
            self.after_steps(self._num_unreported)
        for run in self._runs:
            run.leave()
        if self._compiled:
            self._compiled.clear()
        backends.empty_cache(self._device)
        half = -(-len(self._runs) // 2)
        return [some for some in (self._runs[:half], self._runs[half:]) if some]

    @property
    def leader(self) -> Loop:
        return self._runs[0].training.loop

    def begin(self) -> str | None:
        self._form()
        return self._each(partial(_begin, stop=self._stop))

    def after_steps(self, num: int) -> str | None:
        self._num_unreported = 0
        return self._each(partial(_after_steps, num=num))

    def end_of_epoch(self) -> str | None:
        return self._each(lambda run: run.training.loop.end_of_epoch())

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        at, end = first_step, self._runs[0].training.steps_per_epoch
        steps: Iterator[int] | None = None
        while at < end:
            if self._runs != self._columns:
                self._form()
                steps = None
            steps = steps or self._steps.epoch(number, first_step=at)
            num = self._take(steps, min(end - at, self.buffer.room, self._limits.room(self.buffer.step)))
            at += num
            yield num

    def _take(self, steps: Iterator[int], most: int) -> int:
        generators = [run.generators for run in self._columns]
        taken, began, self._steps_ended = 0, time.perf_counter(), None
        self._gradients.draw_from(generators)
        try:
            while taken < most and (taken == 0 or time.perf_counter() - began < MOST_SECONDS):
                taken += next(steps)
        finally:
            self._gradients.store(generators)
            seconds, self._num_unreported = time.perf_counter() - began, taken
            for lane in self._lanes:
                lane.follow()
            for run in self._columns:
                run.step, run.pulls = run.step + taken, self._pulls_before + self.buffer.pulls
                run.training.step_seconds += seconds
        return taken

    def _each(self, between_steps: Callable[[_MemberRun], str | None]) -> str | None:
        self._runs = [run for run in self._runs if run.goes_on(between_steps)]
        return None if self._runs else "ended"

    def _reset_states(self) -> None:
        for run in self._runs:
            reset_state(run.member.parts.model, run.member.parts.task)

    def _form(self) -> None:
        """Stack the members and their unread rows."""
        runs, train, metrics = self._runs, self._settings.train, self._settings.metrics
        states = [run.state() for run in runs]
        numbers = self._compiled.numbers if self._compiled else ()
        stack = ModelStack([run.member.parts for run in runs], numbers=numbers)
        self._gradients = StackedGradients(stack, compiled=self._compiled)
        if self._columns:
            self._pulls_before += self.buffer.pulls
        self._columns = runs
        self.buffer = MetricBuffer(
            self._device,
            self._deliver,
            background=self._background,
            pull_every=metrics.pull_every,
            every=metrics.every,
            watch="",  # each member checks its own
        )
        self.buffer.step = runs[0].step
        notes = {
            f"{run.number} {name}": points
            for run, state in zip(runs, states, strict=True)
            for name, points in state["notes"].items()
        }
        rows = torch.stack([state["rows"] for state in states], dim=-1)
        self.buffer.load_state({"names": states[0]["names"], "rows": rows, "notes": notes})
        for run in runs:  # not before: memory may end above, and leave() reads the buffer
            run.join(self)
            run.training.clock = self._clock
        lanes = [list(same) for _, same in groupby(runs, key=lambda run: run.lane)]
        self._lanes = [
            Lane([run.member.parts for run in lane], lane[0].member.settings.train.clip_grad_norm) for lane in lanes
        ]
        step = make_stacked_step(self._gradients, self._lanes)
        batches, rates = _StackedBatches([run.member.parts for run in runs]), _LaneRates(lanes, self.buffer)
        steps = EagerSteps(step, batches, accumulate_steps=train.accumulate_steps, rates=rates, buffer=self.buffer)
        self._steps: Epochs = steps
        if self._clock is not None:
            clocked = self._clock.part(STEP, step)
            self._steps = ClockedEpochs(steps, self._clock, progress=self.buffer, one_by_one=steps, clocked=clocked)

    def state_of(self, run: _MemberRun) -> dict[str, Any]:
        """The rows that one member has written and not pulled, as its own buffer would have them.

        Its thread has all rows that were pulled, so what it writes next is not ahead of them.
        """
        self._background.wait()
        state = self.buffer.state()
        rows = state["rows"][..., self._columns.index(run)] if state["names"] else state["rows"]
        if run.ended_at == run.step:  # its rows are reported; those of the others stay
            return {"names": state["names"], "rows": rows[:0], "notes": {}}
        return {"names": state["names"], "rows": rows, "notes": _notes_of(state["notes"], run.number)}

    def pull(self, run: _MemberRun, *, is_end: bool) -> None:
        """Copy all members' rows to the host; returns when their own threads have them."""
        self.buffer.pull(is_end=False)
        self._background.wait()
        run.pulls = self._pulls_before + self.buffer.pulls
        if is_end and run.ended_at != run.step:
            self._deliver_last(run)

    def _deliver_last(self, run: _MemberRun) -> None:
        state = self.state_of(run)
        run.ended_at = run.step
        rows = state["rows"].detach().to("cpu", copy=True)
        if not len(rows):
            return
        if self._steps_ended is None:  # else another member ended here before, and its test is not step time
            self._steps_ended = time.perf_counter()
        means, seconds = rows.mean(0, keepdim=True).numpy(), self._steps_ended - self.buffer.seen_until
        steps, times = torch.tensor([run.step]).numpy(), torch.tensor([int(time.time() * 1000)]).numpy()
        window = Window(tuple(state["names"]), steps, means, times, seconds, len(rows), state["notes"])
        run.training.background.put(partial(run.deliver, window))

    def _deliver(self, window: Window) -> None:
        for column, run in enumerate(self._columns):
            values, notes = window.values[..., column], _notes_of(window.notes, run.number)
            run.training.background.put(partial(run.deliver, replace(window, values=values, notes=notes)))


def _begin(run: _MemberRun, *, stop: StopCondition) -> str | None:
    if run.is_new:
        run.is_new = False
        run.training.begin(stop)
    return run.training.loop.begin()


def _after_steps(run: _MemberRun, *, num: int) -> str | None:
    run.training.background.raise_error()
    return run.training.loop.after_steps(num)


def _fail(run: _MemberRun, *, error: BaseException) -> NoReturn:
    raise error


class _LaneRates:
    """The rates of the lanes, see schedule.Rates: a lane has one schedule, and each member has its notes."""

    def __init__(self, lanes: Sequence[Sequence[_MemberRun]], buffer: MetricBuffer) -> None:
        self._lanes, self._buffer = lanes, buffer

    def note(self) -> None:
        for lane in self._lanes:
            rate = lane[0].member.parts.optimizer.param_groups[0]["lr"]
            if rate == lane[0].training.progress.rate:
                continue
            for run in lane:
                run.training.progress.rate = float(rate)
                self._buffer.note(f"{run.number} train/lr", float(rate))

    def advance(self) -> None:
        for lane in self._lanes:
            lane[0].member.parts.schedule.after_step()


@dataclass(frozen=True)
class _StackedBatches:
    """The members' training batches, (M, B, ...)."""

    parts: Sequence[Parts]

    def epoch(self, number: int, *, first_batch: int = 0) -> Iterator[Any]:
        each = [parts.train.epoch(number, first_batch=first_batch) for parts in self.parts]
        return map(stacked_batches, zip(*each, strict=True))


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
