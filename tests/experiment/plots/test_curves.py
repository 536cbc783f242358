"""What the curves show of more points than a picture has pixels."""

import numpy as np
import pytest

from runner.experiment.plots.curves import MAX_POINTS, _smoothed, _thinned, draw_curves


@pytest.mark.parametrize("num", [1, 2, 2999, 3000, 100_001])
def test_a_spike_of_one_step_is_drawn(num):
    steps = np.arange(1, num + 1)
    values = np.sin(steps / 50)
    values[num // 3], values[num // 2] = 9.0, -9.0
    values[num // 5] = np.nan if num > 9 else values[num // 5]
    some, kept = _thinned(steps, values)
    assert len(some) <= max(3000, MAX_POINTS + 2) and (np.diff(some) > 0).all()
    assert some[0] == 1 and some[-1] == num
    assert (np.nanmax(kept), np.nanmin(kept)) == (np.nanmax(values), np.nanmin(values))
    assert all(value == values[step - 1] or np.isnan(value) for step, value in zip(some, kept, strict=True))


def test_smoothed_curve_is_mean_of_neighbors():
    values = np.random.default_rng(0).normal(size=300)
    values[150], values[5] = np.inf, 1e20
    around = [values[max(0, at - 6) : at + 7] for at in range(300)]
    steps, smooth = _smoothed(np.arange(1, 301), values)
    assert np.allclose(smooth, [each[np.isfinite(each)].mean() for each in around])
    assert (np.diff(steps) == 1).all() and (smooth[:12] > 1e18).all() and (abs(smooth[12:]) < 10).all()


def test_smoothed_long_curve_has_few_points():
    steps, smooth = _smoothed(np.arange(1, 500_001), np.full(500_000, 0.7))
    assert len(steps) <= MAX_POINTS and np.allclose(smooth, 0.7)


def test_no_picture_is_written_over_another_one(tmp_path):
    steps = np.arange(1, 9)
    names = ("train/time", "val/a/b", "val/a_b", "val/roc", "val/roc_curve")
    drawn = draw_curves(dict.fromkeys(names, (steps, steps, 1.0 / steps)), tmp_path, title="title")
    assert [path.stem for path in drawn] == ["time_curve", "a_b_curve", "a_b", "roc_curve_curve", "roc_curve"]


def test_a_picture_for_each_kind_that_has_a_curve(tmp_path):
    steps = np.arange(1, 101)
    series = dict.fromkeys(("train/loss", "val/loss", "speed/steps_per_second"), (steps, steps, 1.0 / steps))
    series["test/loss"] = series["val/accuracy"] = (steps[-1:], steps[-1:], np.ones(1))
    drawn = draw_curves(series, tmp_path, title="title", best=("val/loss", 50))
    assert [path.name for path in drawn] == ["loss.png"]
