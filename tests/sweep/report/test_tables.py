import pytest

from runner.sweep.report import tables
from runner.sweep.report.comparisons import Mean


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (0.98321, "0.9832"),
        (1.2e-5, "1.200e-05"),
        (1234.56, "1,234.6"),
        (float("inf"), "inf"),
        (-2.5, "-2.5000"),
    ],
)
def test_value_is_readable(number, text):
    assert tables.value(number) == text


def test_mean_has_deviation_of_two():
    assert [tables.mean(each) for each in (Mean(0.5, None, 1), Mean(0.5, 0.0, 2), None)] == [
        "0.5000",
        "0.5000 ± 0.0000",
        "",
    ]


@pytest.mark.parametrize(
    ("number", "text"), [(159.4, "159"), (20_793.1, "20,793"), (0.034, "0.034"), (0.0, "0"), (None, "")]
)
def test_speed_has_few_digits(number, text):
    assert tables.speed(number) == text
