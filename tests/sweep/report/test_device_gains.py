import math

import numpy as np
import pytest

from runner.sweep.jobs import ledger
from runner.sweep.report.device_gains import find_gains, largest_difference, over_devices
from runner.sweep.report.results import read_results


def series(steps, values):
    return np.array(steps), np.zeros(len(steps), dtype=np.int64), np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (([1, 2, 3], [1.0, 2.0, 3.0]), ([1, 2, 3], [1.0, 2.0, 3.0]), (0.0, 1, 3)),
        (([1, 2, 3], [1.0, 2.0, 3.0]), ([1, 2, 3], [1.0, 2.5, 3.0]), (0.5, 2, 3)),
        (([1, 2, 3], [1.0, 2.0, 9.0]), ([2, 4], [2.25, 0.0]), (0.25, 2, 1)),
        (([1, 2], [1.0, 2.0]), ([3], [1.0]), (None, None, 0)),
        (([], []), ([1], [1.0]), (None, None, 0)),
        (([1, 2], [math.nan, 1.0]), ([1, 2], [math.nan, 1.0]), (0.0, 1, 2)),
        (([1, 2], [1.0, math.nan]), ([1, 2], [1.0, 1.0]), (math.inf, 2, 2)),
        (([1], [math.inf]), ([1], [math.inf]), (0.0, 1, 1)),
        (([1], [1 + 2**-52]), ([1], [1.0]), (2**-52, 1, 1)),
    ],
)
def test_the_largest_difference_of_two_curves(one, other, expected):
    assert largest_difference(series(*one), series(*other)) == expected


def read(folder):
    return over_devices(read_results(ledger.read(folder)), folder)


def test_each_set_compares_with_the_cpu(grid_folder):
    sets = read(grid_folder)
    assert [each.name for each in sets] == [
        f"model={model} seed={seed}" for model in ("mlp", "cnn") for seed in (1, 2, 3)
    ]
    for each in sets:
        reference, other = each.rows
        assert (each.reference, reference.device, other.device, reference.speed_up) == ("cpu", "cpu", "cuda:0", 1.0)
        assert other.speed_up == pytest.approx(other.samples_per_second / reference.samples_per_second)
        assert 20 < other.speed_up < 30
        assert reference.seconds_to_best > 10 * other.seconds_to_best
        assert 0 < other.difference < 1e-4 and other.num_steps_compared == 600 and reference.difference == 0
    (gain,) = find_gains(sets)
    assert (gain.device, gain.reference, gain.num_pairs) == ("cuda:0", "cpu", 6)
    assert gain.difference == max(each.rows[1].difference for each in sets)
    factors = sorted(each.rows[1].speed_up for each in sets)
    assert gain.speed_up == pytest.approx((factors[2] + factors[3]) / 2)


def test_without_a_cpu_the_slowest_is_the_reference(tmp_path, write):
    sweep = write.folder(tmp_path)
    for device in ("cuda:0", "cuda:1"):
        write.train(sweep, (f"device={device}",), seed=1, device=device)
    (each,) = read(sweep.close())
    assert (each.name, each.reference, [row.device for row in each.rows]) == ("all", "cuda:1", ["cuda:1", "cuda:0"])
    assert each.rows[1].difference == 0 and each.rows[1].num_steps_compared == 600  # the same bits


def test_the_device_that_was_taken_counts_and_not_the_word(tmp_path, write):
    sweep = write.folder(tmp_path)
    for word in ("cpu", "auto"):
        write.train(sweep, (f"device={word}",), seed=1)
    assert read(sweep.close()) == []


def test_only_finished_jobs_are_compared_and_speeds_may_be_missing(tmp_path, write):
    sweep = write.folder(tmp_path)
    sweep.job(("device=cpu", "seed=1"), device="cpu", summary={})
    sweep.job(("device=mps", "seed=1"), device="mps", summary={})
    sweep.job(("device=cpu", "seed=2"), device="cpu", summary={})
    sweep.job(("device=mps", "seed=2"), "failed", device="mps", summary={})
    (each,) = read(sweep.close())
    assert (each.name, each.rows[1].speed_up, each.rows[1].difference) == ("seed=1", None, None)
    assert find_gains([each]) == []
