"""Ranges of tensors: what is finite, what is not, and in which rows, in every type."""

import math

import pytest
import torch

from runner.inspection.not_finite import Range, bad_rows, is_finite, range_of

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_the_range_is_of_what_is_finite(dtype):
    tensor = torch.tensor([[1.0, -2.0], [NAN, INF], [-INF, 0.5]]).to(dtype)
    assert range_of(tensor) == Range(-2.0, 1.0, 6, num_nan=1, num_inf=2)
    assert bad_rows(tensor).tolist() == [False, True, True]
    assert not is_finite(tensor)
    assert range_of(tensor[:1]) == Range(-2.0, 1.0, 2)
    assert is_finite(tensor[:1])


def test_what_holds_no_floating_numbers_has_none():
    for tensor in (torch.arange(3), torch.empty(0, 3), torch.tensor(True), torch.eye(2).to_sparse()):
        assert range_of(tensor) is None
        assert is_finite(tensor)


def test_of_all_that_is_not_finite_there_is_neither_end():
    assert range_of(torch.tensor([NAN, INF])) == Range(None, None, 2, 1, 1)
    assert bad_rows(torch.tensor(NAN)).tolist() == []
    assert bad_rows(torch.tensor([0.0, NAN])).tolist() == [False, True]
