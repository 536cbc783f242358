"""Numbers as people read them: short, and none that says another thing."""

import math
import random

import pytest

from runner.experiment.readable_numbers import WIDTH, readable


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0.0000"),
        (0.0, "0.0000"),
        (0.98321, "0.9832"),
        (0.99999, "0.99999"),
        (-0.99999, "-0.99999"),
        (0.999999999, "0.9999999"),
        (1.0, "1.0000"),
        (-2.5, "-2.5000"),
        (99.99999, "100.0"),
        (123456.7, "123,456.7"),
        (-999_999.94, "-999,999.9"),
        (999_999.96, "1.000e+06"),
        (62847922176.0, "6.285e+10"),
        (16417543687602438144.0, "1.642e+19"),
        (-1e19, "-1.000e+19"),
        (1e-12, "1.000e-12"),
        (0.0005, "5.000e-04"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_what_is_shown(value, shown):
    assert readable(value) == shown


def test_nothing_is_wider_and_nothing_is_far_from_what_it_says():
    draw = random.Random(0)
    for _ in range(5_000):
        value = draw.choice((-1, 1)) * 10 ** draw.uniform(-30, 38)
        shown = readable(value)
        assert len(shown) <= WIDTH
        assert float(shown.replace(",", "")) == pytest.approx(value, rel=6e-4, abs=6e-5)
