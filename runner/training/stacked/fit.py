"""Trains several members together: each is a training of its own (fit.Training), and all of them take each step as one.

A member's loop, evaluation, checkpoints, journal and end are those of a run that is alone. What they share is the step, the
metric buffer and the thread that brings its rows over. A member that ends leaves the stack; the others go on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from runner.training.metric_buffer import MetricBuffer, Window, check_finite
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.signals import Stop
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.stack import Stack
from runner.training.stacked.step import Members, StackedStep
from runner.training.step.clock import STEP, StepClock
from runner.training.stopping import OwnStopCondition

#: after which everybody is asked whether the training is to end
MOST_SECONDS = 0.3
TRAIN = "train/"


@dataclass
class Member:
    """One of several trainings: what it is made of, who hears of it, and where its generators stand.

    lane: equal for those whose optimizers, schedules, clipping and averages have the same settings.
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
    """Trains them, see fit.fit(): a result for each. Those that a kill has left at other steps are trained one set after
    the other. num_together: that compute together, see size.py. say: hears what concerns all of them.
    compiled: the functions that check.py has made of them (None: nothing is compiled).

    One whose checkpoint can't be gone on with fails alone.
    """
    results = [Result(best=member.parts.best) for member in members]
    places = []
    for number, member in enumerate(members):
        try:
            places.append(_Place(member, number, stop))
        except RunnerError as error:
            results[number].error = on_a_line(error)
    for _, together in groupby(sorted(places, key=_Place.stands_at), key=_Place.stands_at):
        _Together(list(together), num_together, stop=stop, say=say, compiled=compiled).run()
    for place in places:
        results[place.number] = place.training.result
    return results


class _OneWord:
    def __init__(self, stop: Stop, parts: Parts) -> None:
        self._own = OwnStopCondition(stop, parts.limits)
        self._step = -1
        self._words: dict[bool, str | None] = {}  # of this step, by whether they are of an epoch's end

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        if step != self._step:
            self._step, self._words = step, {}
        if at_once not in self._words:
            self._words[at_once] = self._own(step, at_once=at_once)
        return self._words[at_once]


class _Place:
    def __init__(self, member: Member, number: int, stop: Stop) -> None:
        self.member, self.number = member, number
        # by a metric each one's rate falls when its own values say so
        self.lane = (member.lane, number) if member.parts.schedule.follows_metric else (member.lane, -1)
        self.step = self.pulls = 0
        self.at = (0, 0)  # epoch, and steps taken of it
        self.ended_at = -1  # the step with which its last point was told
        self.fresh = 0  # steps that were taken and not told yet
        self.error: BaseException | None = None
        self.asked: Any = None
        self.step_seconds = 0.0
        self.clock: StepClock | None = None
        self.generators = dict(member.generators)
        self._state: dict[str, Any] = {"names": [], "rows": torch.empty(0), "notes": {}}
        self._together: _Together | None = None
        with self.world():
            self.training = Training(
                member.parts,
                member.settings,
                member.folder,
                observer=member.observer,
                stop=stop,
                ranks=Alone(),
                place=self,
            )
        batches = member.parts.train.num_batches
        self.steps_per_epoch = -(-batches // member.settings.train.accumulate_steps)

    @contextmanager
    def world(self) -> Iterator[None]:
        """While it lasts, numbers are drawn as in this member's run."""
        with world(self.generators, self.member.parts.device):
            yield
            self.generators = backends.generator_states(self.member.parts.device)

    def stands_at(self) -> tuple[int, int]:
        """Those that are equal take their steps together."""
        return self.training.progress.step, len(self._state["rows"])

    def joins(self, together: _Together) -> None:
        self._together, self.asked = together, together.asked

    # its rows

    def pull(self, *, is_end: bool = True) -> None:
        if self._together is not None:
            self._together.pull(self, is_end=is_end)

    def state(self) -> dict[str, Any]:
        return self._state if self._together is None else self._together.state_of(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def leaves(self) -> None:
        self._state, self._together = self.state(), None

    # its steps

    def steps(self, epoch: int, *, first_step: int = 0) -> Iterator[int]:
        self.at = epoch, first_step
        return self._told()

    def _told(self) -> Iterator[int]:
        while True:
            if self.error is not None:
                raise self.error
            taken, self.fresh = self.fresh, 0
            if not taken:
                return
            self.training.background.raise_error()
            yield taken


class _Together:
    def __init__(
        self,
        places: list[_Place],
        num_together: int,
        *,
        stop: Stop,
        say: Callable[[str], None],
        compiled: Compiled | None,
    ) -> None:
        first = places[0].member
        self._places = sorted(places, key=lambda place: str(place.lane))
        self._settings, self._limits, self._say = first.settings, first.parts.limits, say
        self._device = first.parts.device
        self.asked = _OneWord(stop, first.parts)
        self._background = Background(begin=partial(use_in_thread, self._device))
        self._steps_per_epoch = places[0].steps_per_epoch
        self._batches: Iterator[Any] = iter(())
        self._batches_at = (-1, -1)
        known = max(place.training.progress.num_together for place in places)  # of a part before: the same bits again
        self._num_together, self._compiled = known or num_together, compiled
        if self._num_together != num_together:
            say(f"batch    {known} of {len(places)} jobs compute together, as before, for bitwise identical results")
        self._buffer: MetricBuffer
        self._step: StackedStep
        self._columns: list[_Place] = []
        self._pulls_before = 0
        self._stood_at: float | None = None  # when the steps that were taken were over (None: nobody has waited)
        num_clocked = self._settings.train.clocked_steps
        self._clock = (
            StepClock(num_clocked, first=places[0].training.progress.step, limits=self._limits, device=self._device)
            if num_clocked
            else None
        )

    def run(self) -> None:
        """To the end of all of them."""
        runs: dict[_Place, Generator[None, None, Result]] = {place: place.training.run() for place in self._places}
        try:
            self._form(self._places)
            due = list(runs)
            while due:
                for place in due:
                    if not self._go_on(place, runs[place]):
                        del runs[place]
                due = self._bring_on(list(runs))
        finally:
            self._background.close()

    def _go_on(self, place: _Place, run: Generator[None, None, Result]) -> bool:
        with place.world():
            try:
                next(run)
            except StopIteration:
                place.leaves()
                return False
        return True

    def _bring_on(self, places: list[_Place]) -> list[_Place]:
        if not places:
            return []
        first = min(place.at for place in places)
        due = [place for place in places if place.at == first]
        if first[1] < self._steps_per_epoch and len(due) == len(places):
            try:
                if len(places) != len(self._columns):
                    self._form([place for place in self._columns if place in places])
                self._take(*first)
            except OF_CODE as error:
                for place in places:
                    place.error = error
        return due

    def _form(self, places: list[_Place]) -> None:
        states = [place.state() for place in places]
        for place in places:
            place.joins(self)
        parts = [place.member.parts for place in places]
        lanes = [list(same) for _, same in groupby(places, key=lambda place: place.lane)]
        self._columns, self._lanes = places, lanes
        if self._compiled:
            self._compiled.num_together = self._num_together
        self._step = StackedStep(
            Stack(parts, numbers=self._compiled.numbers if self._compiled else ()),
            [Members([place.member.parts for place in lane], lane[0].member.settings.train) for lane in lanes],
            num_pieces=-(-len(places) // self._num_together),
            say=self._say,
            compiled=self._compiled,
        )
        metrics = self._settings.metrics
        if hasattr(self, "_buffer"):
            self._pulls_before += self._buffer.pulls
        self._buffer = MetricBuffer(
            self._device,
            self._window,
            background=self._background,
            pull_every=metrics.pull_every,
            every=metrics.every,
            watch="",  # each member's own background looks
        )
        self._buffer.step = places[0].step
        notes = {
            f"{place.number} {name}": points
            for place, state in zip(places, states, strict=True)
            for name, points in state["notes"].items()
        }
        rows = torch.stack([state["rows"] for state in states], dim=-1)
        self._buffer.load_state({"names": states[0]["names"], "rows": rows, "notes": notes})

    def _take(self, epoch: int, first: int) -> None:
        num = min(self._steps_per_epoch - first, self._buffer.room, self._limits.room(self._columns[0].step))
        if self._batches_at != (epoch, first) or not self._is_formed_as_batches():
            self._begin_batches(epoch, first)
        generators = [place.generators for place in self._columns]
        taken, began, self._stood_at = 0, time.perf_counter(), None
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
        self._batches_at = epoch, first + taken
        for place in self._columns:
            place.training.progress.num_together = self._num_together
            place.at, place.fresh, place.step = (epoch, first + taken), taken, place.step + taken
            place.pulls = self._pulls_before + self._buffer.pulls
            place.step_seconds, place.clock = place.step_seconds + seconds, self._clock

    def _take_clocked(self) -> int:
        clock = self._clock
        assert clock is not None
        clock.begin()
        batches = next(self._batches)
        self._buffer.write(clock.part(STEP, self._step.take)(batches))
        clock.end(self._buffer.step, 1, is_first=False)
        return clock.due

    def _begin_batches(self, epoch: int, first: int) -> None:
        size = self._settings.train.accumulate_steps
        self._batches_of = list(self._columns)
        each = [place.member.parts.train.epoch(epoch, first_batch=first * size) for place in self._columns]
        together = map(stacked_batches, zip(*each, strict=True))
        self._batches = iter(lambda: tuple(islice(together, size)), ())

    def _is_formed_as_batches(self) -> bool:
        return self._batches_of == self._columns

    def _note_rates(self) -> None:
        for lane in self._lanes:
            progress = lane[0].training.progress
            rate = lane[0].member.parts.optimizer.param_groups[0]["lr"]
            if rate == progress.rate:
                continue
            for place in lane:
                place.training.progress.rate = float(rate)
                self._buffer.note(f"{place.number} train/lr", float(rate))

    # rows

    def state_of(self, place: _Place) -> dict[str, Any]:
        """What one member has written and not pulled, as its own buffer would have it.

        The member's own thread has what was pulled by then: nothing that it writes is ahead of that.
        """
        self._background.wait()
        state = self._buffer.state()
        rows = state["rows"][..., self._columns.index(place)] if state["names"] else state["rows"]
        if place.ended_at == place.step:  # the others' rows stay, and its own are told
            return {"names": state["names"], "rows": rows[:0], "notes": {}}
        return {"names": state["names"], "rows": rows, "notes": _of_number(state["notes"], place.number)}

    def pull(self, place: _Place, *, is_end: bool) -> None:
        """Brings over what all have written, and returns once their own threads have it."""
        self._buffer.pull(is_end=False)
        self._background.wait()
        place.pulls = self._pulls_before + self._buffer.pulls
        if place in self._columns and is_end and place.ended_at != place.step:
            self._tell_end(place)

    def _tell_end(self, place: _Place) -> None:
        state = self.state_of(place)
        place.ended_at = place.step
        rows = state["rows"].detach().to("cpu", copy=True)
        if not len(rows):
            return
        if self._stood_at is None:  # else another has ended here and was tested since, which is no time of these steps
            self._stood_at = time.perf_counter()
        means, seconds = rows.mean(0, keepdim=True).numpy(), self._stood_at - self._buffer.seen_until
        steps, times = torch.tensor([place.step]).numpy(), torch.tensor([int(time.time() * 1000)]).numpy()
        window = Window(tuple(state["names"]), steps, means, times, seconds, len(rows), state["notes"])
        place.training.background.put(partial(_deliver, place, window))

    def _window(self, window: Window) -> None:
        for column, place in enumerate(self._columns):
            values, notes = window.values[..., column], _of_number(window.notes, place.number)
            own = Window(window.names, window.steps, values, window.times_ms, window.seconds, window.num_steps, notes)
            place.training.background.put(partial(_deliver, place, own))


@contextmanager
def world(generators: Mapping[str, Any], device: torch.device) -> Iterator[None]:
    """While it lasts, the process's generators stand where these do; nothing that is drawn meanwhile changes those before."""
    before = backends.generator_states(device)
    backends.set_generator_states(generators, device)
    try:
        yield
    finally:
        backends.set_generator_states(before, device)


def _deliver(place: _Place, window: Window) -> None:
    place.member.observer.window(window)
    check_finite(window)


def _of_number(notes: Mapping[str, list[tuple[int, float]]], number: int) -> dict[str, list[tuple[int, float]]]:
    prefix = f"{number} "
    return {name.removeprefix(prefix): points for name, points in notes.items() if name.startswith(prefix)}


def stacked_batches(batches: Sequence[Any]) -> Any:
    """One batch of each member as one, its tensors (M, B, ...)."""
    columns = iter(zip(*(tensors(batch) for batch in batches), strict=True))
    return map_tensors(batches[0], lambda _: torch.stack(next(columns)))
