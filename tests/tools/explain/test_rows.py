"""The unusual number of a row."""

import pytest
import torch

from runner.tools.explain.rows import _unusual_number

NAMES = ("age", "is_rare", "income")


@pytest.mark.parametrize(
    ("usual", "own", "named"),
    [
        ([3.0, 0.0, 5e4], [3.0, 1.0, 1e12], ("income", 1e12)),
        ([3.0, 0.0, 5e4], [3.0, 1e6, 5e4], ("is_rare", 1e6)),
        ([3.0, 0.0, 5e4], [3.0, 0.02, 6e4], ("", None)),
        ([3.0, 0.0, 5e4], [torch.inf, 1.0, 5e4], ("age", torch.inf)),
    ],
)
def test_flag_of_one_row_hides_nothing(usual, own, named):
    rows = torch.tensor([*[usual] * 15, own], dtype=torch.float64)
    assert _unusual_number((rows, torch.zeros(16)), 15, NAMES) == named
