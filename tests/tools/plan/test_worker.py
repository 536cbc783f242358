"""The search for the largest batch, and its first sizes."""

import time
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from runner.tools.plan.worker import MAX_ROWS, OutOfTime, _largest, largest

LATER = time.monotonic() + 1e6


@pytest.mark.parametrize("start", [1, 64, 5000, 100_000])
@pytest.mark.parametrize(
    "peak", [lambda n: 1000 + 10 * n, lambda n: 50_000 * (n > 300) + 7 * n, lambda n: 100 + n + n * n // 5000]
)
def test_it_fits_and_little_more_would_not(peak, start):
    found = largest(peak, 100_000, start=start, deadline=LATER)
    assert peak(found) <= 100_000
    assert peak(int(found * 1.012) + 1) > 100_000


@pytest.mark.parametrize(
    ("peak", "found", "most_tries"),
    [
        (lambda n: 10**6 + n, 0, 4),  # not even one row
        (lambda n: 900 * n, 1, 6),
        (lambda n: 10, MAX_ROWS, 24),  # does not grow
        (lambda n: (4096 + 123 * n) / 10**6, (10**9 - 4096) // 123, 5),
    ],
)
def test_the_search_takes_few_steps(peak, found, most_tries):
    tried = []
    assert largest(lambda n: tried.append(n) or peak(n), 1000, start=128, deadline=LATER) == found
    assert len(tried) <= most_tries


def test_size_search_without_time_raises():
    with pytest.raises(OutOfTime):
        largest(lambda n: n, 1000, start=1, deadline=time.monotonic() - 1)


def test_size_search_starts_with_loaders_size():
    tried = []
    run = SimpleNamespace(
        cfg=OmegaConf.create({"train": {"precision": "fp32"}}),
        rows_trained=96,
        peak_bytes=lambda size, precision: tried.append(size) or size,
    )
    found = _largest(run, {"precisions": ["tf32"], "usable_bytes": 96}, deadline=LATER)
    assert tried[0] == 96 and found == {"fp32": 96, "tf32": 96}
