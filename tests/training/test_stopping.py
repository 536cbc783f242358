"""Several processes that receive different requests, and act the same way at the same step."""

import signal
import threading
from collections.abc import Callable

import pytest

from runner.training import stopping
from runner.training.signals import Stop
from runner.training.stopping import CommonStopCondition, Limits


class Circle:
    """Ranks that are threads of this process."""

    def __init__(self, num):
        self.num, self.barrier, self.told, self.talks = num, threading.Barrier(num), {}, 0

    def of(self, rank):
        return Member(self, rank)


class Member:
    def __init__(self, circle, rank):
        self.circle, self.rank, self.num, self.is_first = circle, rank, circle.num, rank == 0

    def all_reduce_max(self, numbers):
        circle = self.circle
        circle.told[self.rank] = numbers
        circle.barrier.wait(20)
        found = [max(values) for values in zip(*circle.told.values(), strict=True)]
        circle.barrier.wait(20)
        circle.talks += self.is_first
        return found


def steps(num, limits, *, signals: dict[int, int], num_steps=400, seconds: Callable[[int], float] = lambda rank: 0.001):
    """Prepare ranks that record each answer with its step. signals: By rank, the step at which a signal arrives."""
    circle, heard, now = Circle(num), {rank: [] for rank in range(num)}, threading.local()

    def work(rank):
        stop = Stop()
        now.value = 0.0
        asked = CommonStopCondition(stop, limits, circle.of(rank))
        for step in range(1, num_steps + 1):
            now.value += seconds(rank)
            if signals.get(rank) == step:
                stop.signal = signal.SIGTERM
            word = asked(step)
            if word is not None:
                heard[rank].append((step, word))
            if word in ("stopped", "max_seconds"):
                return

    return circle, heard, work, now


@pytest.fixture
def run(monkeypatch):
    def run(num, limits=None, **more):
        limits = limits or Limits(num_epochs=1, num_steps=1000)
        circle, heard, work, now = steps(num, limits, **more)
        monkeypatch.setattr("time.monotonic", lambda: getattr(now, "value", 0.0))
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.undo()
        return circle, heard

    return run


@pytest.mark.parametrize("rank", [0, 2])
def test_signal_to_one_ends_all_together(run, rank):
    _, heard = run(3, signals={rank: 50})
    assert heard[0] == heard[1] == heard[2]
    ((step, word),) = heard[0]
    assert word == "stopped" and step >= 50


def test_processes_agree_every_half_second(run):
    circle, heard = run(2, signals={}, num_steps=4000, seconds=lambda rank: 0.001 * (rank + 1))
    assert heard == {0: [], 1: []}
    # the slower rank takes 2 ms per step: 200 steps between two exchanges, after some shorter intervals at the start
    assert 4000 * 0.002 / stopping.SECONDS_BETWEEN <= circle.talks <= 4000 * 0.002 / stopping.SECONDS_BETWEEN + 12


def test_checkpoints_by_steps_need_no_talk(run):
    _, heard = run(2, Limits(num_epochs=1, num_steps=100, save_every_steps=30), signals={}, num_steps=100)
    assert heard[0] == heard[1] == [(30, "save"), (60, "save"), (90, "save")]


def test_first_ranks_clock_decides_checkpoints_and_end(run):
    limits = Limits(num_epochs=1, num_steps=1000, save_every_seconds=1.0, max_seconds=3.0)
    _, heard = run(2, limits, signals={}, num_steps=1000, seconds=lambda rank: 0.01 if rank == 0 else 0.5)
    assert heard[0] == heard[1]
    assert [word for _, word in heard[0]].count("save") in (2, 3) and heard[0][-1][1] == "max_seconds"
    assert 300 <= heard[0][-1][0] <= 350


def test_epoch_end_stops_at_once_saves_later(run, monkeypatch):
    told = iter([[1.0, 0.0], [1.0, 0.0]])
    member = Member(Circle(1), 0)
    monkeypatch.setattr(member, "all_reduce_max", lambda numbers: next(told))
    asked = CommonStopCondition(Stop(), Limits(num_epochs=1, num_steps=10), member)
    assert asked(1, at_once=True) is None
    asked._next = 2
    assert asked(2) == "save"
