"""The metrics of a split with generated rows."""

import pytest
import torch

from runner.tasks.adversarial import energy_distance


@pytest.mark.parametrize("rows", [4, 8, 64])
def test_the_distance_of_rows_that_are_alike_is_none_however_many_there_are(rows):
    draw = torch.Generator().manual_seed(0)
    found = [energy_distance(*(torch.randn(rows, 2, generator=draw) for _ in range(2))) for _ in range(400)]
    assert abs(float(torch.stack(found).mean())) < 0.06


def test_the_distance_of_rows_that_are_not_alike_is_as_far_as_they_are():
    one, other = torch.zeros(5, 1), torch.full((3, 1), 2.0)
    assert energy_distance(one, other) == 4.0
    assert energy_distance(one[:1], other[:1]) == 4.0
