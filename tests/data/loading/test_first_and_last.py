"""The first and the last batch of a split, whole or a process's share of them."""

import pytest
import torch

from runner.data.loading.first_and_last import FirstAndLast
from runner.data.loading.resident import Resident
from runner.data.loading.shard import Shard


def batches(num_rows=10, shuffle=False):
    rows = (torch.arange(num_rows), torch.arange(num_rows))
    return Resident(rows, batch_size=4, device=torch.device("cpu"), seed=0, shuffle=shuffle)


def test_split_is_its_first_and_smaller_last_batch():
    ends = FirstAndLast(batches())
    assert [found[0].tolist() for found in ends.epoch(0)] == [[0, 1, 2, 3], [8, 9]]
    assert (ends.num_rows, ends.num_batches, ends.batch_size) == (6, 2, 4)
    assert [found[0].tolist() for found in ends.epoch(0, first_batch=1)] == [[8, 9]]


@pytest.mark.parametrize("num_rows", [3, 8])
def test_split_without_a_smaller_last_batch(num_rows):
    ends = FirstAndLast(batches(num_rows))
    assert len([*ends.epoch(0)]) == ends.num_batches == 1 and ends.num_rows == min(num_rows, 4)


def test_a_process_has_its_share_of_it():
    shares = [next(FirstAndLast(batches()).epoch(0, shard=Shard(rank, 2))) for rank in (0, 1)]
    assert [share.batch[0].tolist() for share in shares] == [[0, 1], [2, 3]]
    assert [(share.rows.num, share.rows.of) for share in shares] == [(2, 4), (2, 4)]
