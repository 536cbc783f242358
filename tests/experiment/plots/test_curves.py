"""Curves with few and with many points, and their files."""

import numpy as np
import pytest

from runner.experiment.plots.curves import draw_curves, thin


@pytest.mark.parametrize(("count", "num"), [(100, 100), (10, 10), (1000, 100)])
def test_thin_curve_has_means_of_bins(count, num):
    steps, values = thin(np.arange(1, 101), np.arange(100.0), count)
    assert len(steps) == num and values == pytest.approx(np.arange(100.0).reshape(num, -1).mean(1))
    assert (np.diff(steps) > 0).all() and len(thin(np.arange(103), np.arange(103.0), 10)[0]) == 10


def test_thin_curve_leaves_infinite_values_out():
    _, values = thin(np.arange(8), np.array([1.0, np.nan, np.inf, 3.0, *[np.nan] * 4]), 2)
    assert values[0] == 2.0 and np.isnan(values[1])


def test_plot_is_drawn_for_each_curve(tmp_path):
    steps = np.arange(1, 1001)
    names = ("train/loss", "val/loss", "speed/steps_per_second", "val/roc", "val/a/b")
    series = dict.fromkeys(names, (steps, steps, 1.0 / steps))
    series["test/loss"] = series["val/accuracy"] = (steps[-1:], steps[-1:], np.ones(1))
    drawn = draw_curves(series, tmp_path, title="title", best=("val/loss", 50))
    assert [path.name for path in drawn] == ["loss.png", "roc_curve.png", "a_b.png"]
