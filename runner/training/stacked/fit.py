"""Trains several members together: each has its own Training, and a group takes each step as one.

A member's evaluations, checkpoints, journal and end are those of a single run, as is its metric buffer. A group has the loop
and the steps of a single run (loop.train, EagerSteps), with values (M,). A member that ends leaves the group, and the others
continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import torch

from runner.config.settings import Settings
from runner.data.loading.batches import Shard
from runner.device import backends
from runner.device.placement import map_tensors, tensors
from runner.device.streams import wait_for
from runner.distributed.group import Alone
from runner.errors import CODE_ERRORS, RunnerError, on_a_line
from runner.training.carried_state import reset_state
from runner.training.fit import Training, fit
from runner.training.loop import Epochs, Loop, train
from runner.training.metric_buffer import SharedRows
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.schedule import Rates
from runner.training.signals import Stop
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.stack import ModelStack
from runner.training.stacked.step import Lane, StackedGradients, make_stacked_step
from runner.training.step.clock import STEP, ClockedEpochs, StepClock
from runner.training.step.train_step import EagerSteps
from runner.training.stopping import OwnStopCondition, StopCondition

#: what is due between the steps of a member; returns why its training ends, or None
BetweenSteps = Callable[[Training], str | None]
#: seconds of steps between two checks whether the training ends
MAX_SECONDS = 0.3


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
        num_together: How many compute together, see check.py. 1: each member is trained as a single run.
        say: Prints what concerns all members.
        compiled: The functions that check.py compiled for them; None: nothing is compiled.

    Returns:
        A result for each member. A member whose checkpoint can't be resumed fails, and the others don't.
    """
    results = [Result(best=member.parts.best) for member in members]
    runs = []
    for number, member in enumerate(members):
        try:
            if num_together > 1:
                runs.append(_MemberRun(member, number, stop))
                continue
            parts, settings, folder = member.parts, member.settings, member.folder
            with world(member.generators, parts.device):
                results[number] = fit(parts, settings, folder, observer=member.observer, stop=stop, ranks=Alone())
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


def same_answer_for_all(stop: StopCondition) -> StopCondition:
    """Call a stop condition once for each step, so that all members get the same answer."""
    return lru_cache(maxsize=2)(stop)


class _MemberRun:
    """A member's Training, and the states of its generators."""

    def __init__(self, member: Member, number: int, stop: Stop) -> None:
        self.member, self.number = member, number
        # a rate that follows a metric falls by each member's own values
        self.lane = (member.lane, number if member.parts.schedule.follows_metric else -1)
        self.generators = dict(member.generators)
        self.busy_until: float | None = None  # None: it has not begun
        # a guard watches one model's step
        settings = replace(member.settings, placement=replace(member.settings.placement, guard="off"))
        with self.own_generators():
            self.training = Training(
                member.parts, settings, member.folder, observer=member.observer, stop=stop, ranks=Alone()
            )

    @contextmanager
    def own_generators(self) -> Iterator[None]:
        """Draw random numbers as in this member's run."""
        with world(self.generators, self.member.parts.device):
            yield
            self.generators = backends.generator_states(self.member.parts.device)

    def position(self) -> tuple[int, int]:
        """Equal for members that take their steps together."""
        return self.training.progress.step, self.training.buffer.num_unread

    def leave_out_wait(self) -> None:
        """Leave the seconds since it was busy out of this member's time: of the other members, and of stacking them."""
        if self.busy_until is not None:
            self.training.leave_out(time.perf_counter() - self.busy_until)

    def goes_on(self, between_steps: BetweenSteps) -> bool:
        """Do what is due between steps, which returns why the training ends. Returns whether it continues."""
        reason: str | None = "failed"
        with self.own_generators():
            with self.training.failures():
                reason = between_steps(self.training)
                if reason is not None:
                    self.training.end(reason)
            if reason is not None:
                self.training.close()
        return reason is None


class _Group:
    """Members that take their steps together: their loop, see loop.Decisions, and their steps, see loop.Epochs."""

    def __init__(self, runs: list[_MemberRun], *, stop: Stop, compiled: Compiled | None) -> None:
        first = runs[0].member
        self._runs, self._compiled = runs, compiled
        self._settings, self._limits, self._device = first.settings, first.parts.limits, first.parts.device
        self._stop = same_answer_for_all(OwnStopCondition(stop, self._limits))
        self._stacked: list[_MemberRun] = []  # those of the steps
        self._rows = SharedRows([])
        self._clock: StepClock | None = None
        if num_clocked := self._settings.train.clocked_steps:
            step = runs[0].training.progress.step
            self._clock = StepClock(num_clocked, first=step, limits=self._limits, device=self._device)
        for run in runs:
            run.training.clock = self._clock

    def train(self) -> list[list[_MemberRun]]:
        """Train until all members have ended. Returns two halves, to be trained instead, if memory ends."""
        try:
            train(self, self, begin_epoch=self._reset_states)
            return []
        except CODE_ERRORS as error:
            failed = error
        if backends.is_out_of_memory(failed) and len(self._runs) > 1:
            del failed  # it keeps the activations alive
            return self._halves()
        num = self._rows.count()

        def fail(training: Training) -> NoReturn:
            training.buffer.wrote(num)
            raise failed

        self._each(fail)
        return []

    def _halves(self) -> list[list[_MemberRun]]:
        if self._rows.num_uncounted:
            self.after_steps(0)
        if self._compiled:
            self._compiled.clear()
        backends.empty_cache(self._device)
        half = -(-len(self._runs) // 2)
        return [some for some in (self._runs[:half], self._runs[half:]) if some]

    @property
    def leader(self) -> Loop:
        return self._runs[0].training.loop

    def begin(self) -> str | None:
        def begin(training: Training) -> str | None:
            if not hasattr(training, "loop"):  # else it is half of a group whose memory ended
                training.begin(self._stop)
            return training.loop.begin()

        return self._each(begin)

    def after_steps(self, num: int) -> str | None:
        """Count the steps that were taken, also those of a call that failed."""
        step, num = self._rows.step, self._rows.count()
        self._runs = [run for run in self._runs if run.goes_on(lambda training: training.buffer.wrote(num))]
        self._wait(is_device_read=self._limits.evaluates_at(step))
        return self._each(lambda training: training.loop.after_steps(num))

    def end_of_epoch(self) -> str | None:
        self._wait(is_device_read=True)
        return self._each(lambda training: training.loop.end_of_epoch())

    def _wait(self, *, is_device_read: bool) -> None:
        """Count the wait for the steps as time of all members. is_device_read: Whether the first one to evaluate would wait."""
        if is_device_read:
            wait_for(self._device)
        for run in self._runs:
            run.busy_until = time.perf_counter()

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        at, end = first_step, self._runs[0].training.steps_per_epoch
        steps: Iterator[int] | None = None
        while at < end:
            if self._runs != self._stacked:
                self._form()
                steps = None
            steps = steps or self._steps.epoch(number, first_step=at)
            num = self._take(steps, min(end - at, self._rows.room, self._limits.room(self._rows.step)))
            at += num
            yield num

    def _take(self, steps: Iterator[int], most: int) -> int:
        generators = [run.generators for run in self._runs]
        for run in self._runs:
            run.leave_out_wait()
        taken, began = 0, time.perf_counter()
        self._gradients.draw_from(generators)
        try:
            while taken < most and (taken == 0 or time.perf_counter() - began < MAX_SECONDS):
                taken += next(steps)
        finally:
            self._gradients.store(generators)
            for lane in self._lanes:
                lane.follow()
            for run in self._runs:
                run.busy_until = time.perf_counter()
        return taken

    def _each(self, between_steps: BetweenSteps) -> str | None:
        continuing = []
        for run in self._runs:
            run.leave_out_wait()
            if run.goes_on(between_steps):
                continuing.append(run)
            run.busy_until = time.perf_counter()
        self._runs = continuing
        return None if self._runs else "ended"

    def _reset_states(self) -> None:
        for run in self._runs:
            reset_state(run.member.parts.model, run.member.parts.task)

    def _form(self) -> None:
        """Stack the members' weights and the memory of their rows, and make their steps."""
        runs, accumulate_steps = self._runs, self._settings.train.accumulate_steps
        stack = ModelStack([run.member.parts for run in runs])
        self._gradients = StackedGradients(stack, compiled=self._compiled)
        self._stacked, self._rows = runs, SharedRows([run.training.buffer for run in runs])
        lanes = [[run.training for run in same] for _, same in groupby(runs, key=lambda run: run.lane)]
        self._lanes = [Lane([run.parts for run in lane], lane[0].settings.train.clip_grad_norm) for lane in lanes]
        step = make_stacked_step(self._gradients, self._lanes)
        batches, rates = _StackedBatches([run.member.parts for run in runs]), _LaneRates(lanes, self._rows)
        steps = EagerSteps(step, batches, accumulate_steps=accumulate_steps, rates=rates, buffer=self._rows)
        self._steps: Epochs = steps
        if self._clock is not None:
            clocked = self._clock.part(STEP, step)
            self._steps = ClockedEpochs(steps, self._clock, progress=self._rows, one_by_one=steps, clocked=clocked)


class _LaneRates:
    """The rates of the lanes: a lane has the first one's schedule, and each member has its notes."""

    def __init__(self, lanes: Sequence[Sequence[Training]], rows: SharedRows) -> None:
        self._rows, self._lanes = (
            rows,
            [
                [
                    Rates(lane[0].parts.optimizer, lane[0].parts.schedule, buffer=run.buffer, progress=run.progress)
                    for run in lane
                ]
                for lane in lanes
            ],
        )

    def note(self) -> None:
        for lane in self._lanes:
            for rates in lane:
                rates.note(ahead=self._rows.num_uncounted)

    def advance(self) -> None:
        for lane in self._lanes:
            lane[0].advance()


@dataclass(frozen=True)
class _StackedBatches:
    """The members' training batches, (M, B, ...)."""

    parts: Sequence[Parts]

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        each = [parts.train.epoch(number, first_batch=first_batch, shard=shard) for parts in self.parts]
        return map(stacked_batches, zip(*each, strict=True))


@contextmanager
def world(generators: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """Set the process's generators to these states in the block, and back afterwards."""
    with backends.generators_restored(device):
        backends.set_generator_states(generators, device)
        yield


def stacked_batches(batches: Sequence[Any]) -> Any:
    """One batch of all members, whose tensors are (M, B, ...), from a batch of each."""
    columns = iter(zip(*(tensors(batch) for batch in batches), strict=True))
    return map_tensors(batches[0], lambda _: torch.stack(next(columns)))
