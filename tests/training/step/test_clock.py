"""Clocked steps: which steps they are, how their parts add up, and a training that they do not change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from runner import cli
from runner.tracking.journal_reader import read_points
from runner.training.loop import Best, Progress
from runner.training.step import clock as clocks
from runner.training.step.clock import ClockedEpochs, StepClock
from runner.training.stopping import Limits

CPU = torch.device("cpu")
WORDS = ("model=mlp", "model.hidden_sizes=[8]", "task.plots=false", "tracking.enabled=false")


class Time:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Steps:
    """Epochs of steps. A batch takes `data`, plus `first` for the first of an epoch; a step takes `step`, and the work after it `write`."""

    def __init__(self, time: Time, num: int, *, data=1.0, first=0.0, step=2.0, write=0.5, warm=0.0) -> None:
        self.time, self.steps_per_epoch, self.warm = time, num, warm
        self.data, self.first, self.write, self.taken = data, first, write, 0
        self.step = lambda _: self.pass_by(step)

    def pass_by(self, seconds: float) -> None:
        self.time.now += seconds

    def epoch(self, number, *, first_step=0):
        for index in range(first_step, self.steps_per_epoch):
            self.pass_by(self.data + self.first * (index == 0))
            self.step([None])
            self.pass_by(self.write + self.warm * (self.taken == 0))
            self.taken += 1
            yield 1


@pytest.fixture
def time(monkeypatch):
    found = Time()
    monkeypatch.setattr(clocks, "time", found)
    return found


def train(time, steps, *, epochs=1, num=50, **limits):
    total = steps.steps_per_epoch * epochs
    clock = StepClock(num, first=0, limits=Limits(epochs, total, **limits), device=CPU)
    progress, called, usual = Progress(Best("val/loss", "min")), [], steps.step

    def clocked(batches):
        called.append(progress.step + 1)
        return clock.part(
            "backward", lambda: (clock.part("forward", lambda: steps.pass_by(0.5))(), steps.pass_by(1.5))
        )()

    through = ClockedEpochs(steps, clock, progress=progress, one_by_one=steps, clocked=clocked)
    for epoch in range(epochs):
        for taken in through.epoch(epoch):
            progress.step += taken
    assert steps.step is usual
    return clock.times(time.now, total), called


def test_parts_make_up_the_whole(time):
    times, called = train(time, Steps(time, 1000))
    assert sum(times.parts.values()) + times.warm_seconds == pytest.approx(time.now)
    assert times.parts == pytest.approx({"data": 1000, "forward": 500, "backward": 1500, "metrics": 500})
    assert times.num_clocked == len(called) and 40 <= len(called) <= 60
    thirds = [sum(low < step <= low + 334 for step in called) for low in (0, 333, 666)]
    assert min(thirds) >= 12, "spread over the run"


def test_first_steps_extra_time_is_separate(time):
    times, _ = train(time, Steps(time, 500, warm=99.0))
    assert times.warm_seconds == pytest.approx(99.0)
    assert times.parts["metrics"] == pytest.approx(250)


def test_first_steps_of_epochs_count_once_each(time):
    times, _ = train(time, Steps(time, 20, first=10.0), epochs=100)
    assert times.parts["data"] == pytest.approx(2000 + 99 * 10, rel=0.02)
    assert times.parts["forward"] == pytest.approx(1000, rel=0.02)


def test_training_with_early_end_is_timed_throughout(time):
    _, called = train(time, Steps(time, 20_000), max_seconds=5.0)
    assert sum(step < 1000 for step in called) >= 15 and 40 <= len(called) <= 120
    _, called = train(time, Steps(time, 20_000))
    assert sum(step < 1000 for step in called) <= 5


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_few_steps_or_none(time, num_steps):
    times, _ = train(time, Steps(time, num_steps))
    assert sum(times.parts.values()) + times.warm_seconds == pytest.approx(time.now)


def test_device_that_fails_has_no_clock(time, monkeypatch):
    def fail(end):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(clocks.streams, "has_clock", lambda device: True)
    monkeypatch.setattr(clocks.streams, "time_event", lambda device: SimpleNamespace(elapsed_time=fail))
    times, _ = train(time, Steps(time, 100))
    assert times.device_seconds is None and times.num_clocked > 0
    assert sum(times.parts.values()) + times.warm_seconds == pytest.approx(time.now)


def test_the_training_is_what_it_is_without(own_folder):
    losses = []
    for words in (("train.clocked_steps=null",), ("train.clocked_steps=1000",)):
        assert cli.main([*WORDS, f"hydra.run.dir=run{len(losses)}", "train.num_steps=30", *words]) == 0
        losses.append(list(read_points(own_folder / f"run{len(losses)}")["train/loss"]))
    assert losses[0] == losses[1]
