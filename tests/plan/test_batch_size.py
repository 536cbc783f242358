"""The largest batch that fits, of a memory that grows as a formula says."""

import time

import pytest

from runner.plan.worker import OutOfTime, largest

LATER = time.monotonic() + 1e6


@pytest.mark.parametrize("start", [1, 64, 5000, 100_000])
@pytest.mark.parametrize(
    "peak", [lambda n: 1000 + 10 * n, lambda n: 50_000 * (n > 300) + 7 * n, lambda n: 100 + n + n * n // 5000]
)
def test_it_fits_and_little_more_would_not(peak, start):
    found = largest(peak, 100_000, start=start, deadline=LATER)
    assert peak(found) <= 100_000
    assert peak(int(found * 1.012) + 1) > 100_000


def test_not_even_one_row():
    assert largest(lambda n: 10**6 + n, 1000, start=128, deadline=LATER) == 0


def test_one_row_alone():
    assert largest(lambda n: 900 * n, 1000, start=128, deadline=LATER) == 1


def test_it_takes_few_steps():
    tried = []

    def peak(n):
        tried.append(n)
        return 4096 + 123 * n

    largest(peak, 10**9, start=128, deadline=LATER)
    assert len(tried) <= 4


def test_memory_that_does_not_grow_has_no_largest_batch():
    assert largest(lambda n: 10, 1000, start=128, deadline=LATER) == 2**24


def test_it_says_when_there_is_no_time():
    with pytest.raises(OutOfTime):
        largest(lambda n: n, 1000, start=1, deadline=time.monotonic() - 1)
