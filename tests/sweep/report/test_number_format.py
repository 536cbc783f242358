import math

import pytest

from runner.sweep.report import number_format
from runner.sweep.report.seeds import Mean


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (0.0, "0.0000"),
        (0.98321, "0.9832"),
        (1.2e-5, "1.200e-05"),
        (1234.56, "1,234.6"),
        (math.inf, "inf"),
        (-2.5, "-2.5000"),
        (3e7, "3.000e+07"),
    ],
)
def test_values(number, text):
    assert number_format.value(number) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [(None, ""), (0.1234, "0.12 s"), (85.2, "85 s"), (725, "12 min 5 s"), (3 * 3600 + 725, "3 h 12 min")],
)
def test_seconds(duration, text):
    assert number_format.seconds(duration) == text


def test_a_single_value_has_no_deviation():
    assert (
        number_format.mean(Mean(0.5, None, 1)),
        number_format.mean(Mean(0.5, 0.0, 2)),
        number_format.mean(None),
    ) == (
        "0.5000",
        "0.5000 ± 0.0000",
        "",
    )


@pytest.mark.parametrize(
    ("number", "text"), [(159.4, "159"), (20_793.1, "20,793"), (0.034, "0.034"), (0.0, "0"), (None, "")]
)
def test_speeds(number, text):
    assert number_format.speed(number) == text
