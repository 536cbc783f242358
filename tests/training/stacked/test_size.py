"""The number of members that compute together, chosen by the times of some sizes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from runner.training.stacked import check as size

CPU = torch.device("cpu")


def nothing(num):
    """Two functions that do nothing, for a number of members."""
    return partial(int, num), int


@pytest.mark.parametrize("whole", [2, 3, 8, 9, 10, 12, 16, 23, 64])
@pytest.mark.parametrize("best", [1, 6, 12, 64])
def test_any_number_of_members_has_a_size(monkeypatch, whole, best):
    """The time per member falls up to `best` members, and rises after that; a small gain does not justify a different rounding."""
    tried = []

    def of_each(together):
        return 1e-3 * (1.0 + abs(together - best) / 16)

    def seconds(compute, undo, device):
        tried.append(compute())
        return of_each(tried[-1]) * tried[-1]

    monkeypatch.setattr(size, "_seconds", seconds)
    monkeypatch.setattr(size, "HOST_SECONDS", 0.0)
    monkeypatch.setattr(size, "free_bytes", lambda device: None)
    monkeypatch.setattr(size, "_saved_bytes", lambda compute: 1)
    found = size.choose_size(nothing, whole=whole, device=CPU)
    assert tried == sorted(set(tried)) and tried[:2] == [1, 2]
    assert tried[-1] == whole or tried[-1] >= max(best, 8)
    least = min(tried, key=of_each)
    most = least if of_each(least) <= 0.85 * of_each(1) else 1
    assert found.num_together <= most and -(-whole // found.num_together) == -(-whole // most)
    assert f"of {whole} jobs" in found.words
    monkeypatch.setattr(size, "free_bytes", lambda device: 7 / size.ACTIVATIONS_SHARE)  # enough for seven members
    tried.clear()
    assert (
        size.choose_size(nothing, whole=whole, device=CPU).num_together <= 7
        and len(tried) == len(set(tried))
        and max(tried) <= 7
    )


def test_first_call_of_a_size_is_not_timed(monkeypatch):
    """The first call may load kernels and choose algorithms, which takes longer than all other calls."""
    called, algorithms, now = set(), [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(size, "time", clock)

    def slow_at_first(num):
        def compute():
            now[0] += 1e-3 if num in called else 0.05
            called.add(num)
            algorithms.append(torch.backends.cudnn.benchmark)

        return compute, int

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(size, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(size, "free_bytes", lambda device: None)
    assert size.choose_size(slow_at_first, whole=64, device=CPU).num_together == 64
    assert not any(algorithms) and torch.backends.cudnn.benchmark
