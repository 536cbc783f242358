"""A split's first batch in its place: the same rows, once, whole or a process's share."""

import torch

from runner.data.loading.first_batch import FirstBatch
from runner.data.loading.resident import Resident
from runner.data.loading.shard import Shard


def batches(num_rows=10, shuffle=False):
    rows = (torch.arange(num_rows), torch.arange(num_rows))
    return Resident(rows, batch_size=4, device=torch.device("cpu"), seed=0, shuffle=shuffle)


def test_the_first_batch_is_all_there_is():
    first = FirstBatch(batches())
    (found,) = first.epoch(0)
    assert found[0].tolist() == [0, 1, 2, 3] and (first.num_rows, first.num_batches, first.batch_size) == (4, 1, 4)
    assert [*first.epoch(0, first_batch=1)] == [] and first.indexed() is None
    assert FirstBatch(batches(num_rows=3)).num_rows == 3


def test_a_process_has_its_share_of_it():
    shares = [next(FirstBatch(batches()).epoch(0, shard=Shard(rank, 2))) for rank in (0, 1)]
    assert [share.batch[0].tolist() for share in shares] == [[0, 1], [2, 3]]
    assert [(share.rows.num, share.rows.of) for share in shares] == [(2, 4), (2, 4)]
