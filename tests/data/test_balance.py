"""The line that reports the balance of a user's classes."""

import pytest
import torch

from runner.data.sampler import balance
from runner.data.source import from_arrays


def source(*counts):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return from_arrays(torch.zeros(len(labels), 2), labels.numpy(), name="rows")


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((100, 100), ""),
        ((90, 10), ""),
        ((1, 5, 7), ""),
        (
            (199, 1),
            "uneven classes: 0 199, 1 1 rows; always 0 is right in 99.5% of them (see task.metrics=[f1], data.sampler=balanced)",
        ),
        (
            (5, 195),
            "uneven classes: 1 195, 0 5 rows; always 1 is right in 97.5% of them (see task.metrics=[f1], data.sampler=balanced)",
        ),
        (
            (50, 4, 60, 70, 80, 3),
            "uneven classes: 4 80, 3 70, ..., 1 4, 5 3 rows; always 4 is right in 30.0% of them (see task.metrics=[f1], data.sampler=balanced)",
        ),
        ((200,), "all 200 rows are of one class, 0: nothing can be learned of it"),
        ((1,) * 200, "200 classes in 200 rows, and 200 of them have 1 row: a number to predict, or a key?"),
        ((3, *(1,) * 9), "10 classes in 12 rows, and 9 of them have 1 row: a number to predict, or a key?"),
    ],
)
def test_what_is_told(counts, told):
    assert balance(source(*counts)) == told


def test_a_regression_has_no_classes():
    assert balance(from_arrays(torch.zeros(9, 2), torch.arange(9.0), name="rows")) == ""
