"""The line about kinds of devices, and numbers for people."""

import pytest

from runner.device.benchmark.cache import Measured, MeasuredDevice
from runner.device.benchmark.text import comparison, figure


def measured(**tflops):
    """By name, with a _ for the colon."""
    return Measured(
        {
            name.replace("_", ":"): MeasuredDevice({"fp32": value * 1e12} if value else {}, 1.0, 1.0, 1.0, 1.0, "")
            for name, value in tflops.items()
        }
    )


@pytest.mark.parametrize(
    ("found", "devices", "text"),
    [
        (measured(cuda_0=41.0, cpu=0.1), ["cuda:0", "cpu"], "cuda:0 41.0 TFLOP/s fp32, cpu 0.100 (410 times)"),
        (measured(cpu=2.0, mps=3.0), ["cpu", "mps"], "mps 3.00 TFLOP/s fp32, cpu 2.00 (1.5 times)"),
        (measured(cpu=2.0, mps=1.0), ["cpu", "mps"], "cpu 2.00 TFLOP/s fp32, mps 1.00 (2.0 times)"),
        (
            measured(cuda_0=5.0, cuda_1=50.0, cpu=0.01),
            ["cuda:0", "cuda:1", "cpu"],
            "cuda:1 50.0 TFLOP/s fp32, cpu 0.0100 (5,000 times)",
        ),
        (
            measured(cuda_0=5.0, cuda_1=50.0, cpu=1.0),
            ["cuda:0", "cpu"],
            "cuda:0 5.00 TFLOP/s fp32, cpu 1.00 (5.0 times)",
        ),
        (measured(cuda_0=5.0, cuda_1=50.0), ["cuda:0", "cuda:1"], ""),
        (measured(cuda_0=5.0), ["cuda:0", "cpu"], ""),
        (measured(cuda_0=5.0, cpu=0), ["cuda:0", "cpu"], ""),
        (measured(cuda_0=5.0, cpu=1.0), [], ""),
        (Measured({}), ["cuda:0", "cpu"], ""),
        (None, ["cuda:0", "cpu"], ""),
    ],
)
def test_kinds_of_devices_are_compared(found, devices, text):
    assert comparison(found, devices) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.00241, "0.00241"), (0.026, "0.0260"), (0.9996, "1.00"), (1.0, "1.00"), (9.994, "9.99"), (9.996, "10.0")),
        *((99.94, "99.9"), (99.96, "100"), (4100.4, "4,100"), (1e6, "1,000,000")),
    ],
)
def test_a_figure_has_three_digits_that_count(value, text):
    assert figure(value) == text
