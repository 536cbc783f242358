"""Times on an invented clock: what is called how often, and what comes out."""

import pytest

from runner.device.benchmark.timing import Spread, long_enough, once, seconds_of, spread


class Machine:
    """A device whose calls take the seconds that it is told, one after the other, but only once they are waited for."""

    def __init__(self, *seconds, default=1.0):
        self.now, self.waiting, self.seconds, self.default = 0.0, 0.0, list(seconds), default
        self.num_calls = 0

    def call(self):
        self.num_calls += 1
        self.waiting += self.seconds.pop(0) if self.seconds else self.default

    def wait(self):
        self.now, self.waiting = self.now + self.waiting, 0.0

    def clock(self):
        return self.now


def test_a_call_is_timed_to_its_end_and_without_what_came_before_it():
    machine = Machine(default=2.0)
    machine.call()
    assert once(machine.call, machine.wait, clock=machine.clock) == 2.0
    assert once(machine.call, machine.wait, count=3, clock=machine.clock) == 6.0


def test_the_warm_up_does_not_count_and_the_middle_one_does():
    machine = Machine(100.0, 1.0, 5.0, 1.0, 2.0)  # the first one loads kernels, the second one is the look at how long
    found = seconds_of(machine.call, machine.wait, repeats=3, least_seconds=0.5, clock=machine.clock)
    assert found == Spread(2.0, 1.0, 5.0)


def test_short_calls_are_timed_many_at_a_time():
    machine = Machine(default=0.25)
    found = seconds_of(machine.call, machine.wait, repeats=3, least_seconds=1.5, clock=machine.clock)
    assert found == Spread(0.25, 0.25, 0.25)
    assert machine.num_calls == 1 + (1 + 2 + 4 + 8) + 3 * 8


@pytest.mark.parametrize(
    ("values", "found"),
    [([3.0], (3.0, 3.0, 3.0)), ([4.0, 1.0], (2.5, 1.0, 4.0)), ([9.0, 1.0, 2.0], (2.0, 1.0, 9.0))],
)
def test_a_spread(values, found):
    assert spread(values) == Spread(*found)


def test_the_longest_time_is_the_lowest_rate():
    assert Spread(2.0, 1.0, 4.0).rate(8.0) == Spread(4.0, 2.0, 8.0)
    assert Spread(2.0, 1.0, 4.0).times(10.0) == Spread(20.0, 10.0, 40.0)


@pytest.mark.parametrize(
    ("least_seconds", "most", "size"),
    [(0.0, 1024, 8), (1.0, 1024, 128), (1.0, 127, 64), (1.0, 4, 8), (1e9, 1024, 1024)],
)
def test_a_size_is_doubled_until_it_takes_long_enough(least_seconds, most, size):
    asked = []

    def seconds_at(rows):
        asked.append(rows)
        return (rows / 128) ** 3

    assert long_enough(seconds_at, first=8, most=most, least_seconds=least_seconds) == size
    assert max([8, *asked]) <= size, "nothing larger is tried"
