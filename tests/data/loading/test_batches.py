"""The shares of several processes, and the first and last batch."""

import pytest
import torch
from torch import nn

from runner.data.loading.batch_transform import TransformedBatches
from runner.data.loading.batches import FirstAndLast, Shard, Sharded
from runner.data.loading.resident import Resident
from runner.data.loading.streamed import Streamed

CPU = torch.device("cpu")
ROWS = torch.arange(23), torch.arange(23) * 2


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(())


def loaders(rows=ROWS, **settings):
    given = {"batch_size": 5, "device": CPU, "seed": 3, "shuffle": True, **settings}
    return [Resident(rows, **given), Streamed(rows, **given)]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_each_row_counts_once(num, size):
    parts = [Shard(rank, num).rows(size) for rank in range(num)]
    counted = [row for part in parts for row in range(part.start, part.start + part.num)]
    assert counted == list(range(size))
    assert all(part.of == size and part.stop > part.start and part.stop <= size for part in parts)
    assert max(part.num for part in parts) - min(part.num for part in parts) <= 1


@pytest.mark.parametrize("loader", [0, 1])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("first_batch", [0, 2])
def test_shares_put_together_are_the_batch(loader, shuffle, first_batch):
    batches = loaders(shuffle=shuffle)[loader]
    whole = list(batches.epoch(1, first_batch=first_batch))
    parts = [list(batches.epoch(1, first_batch=first_batch, shard=Shard(rank, 4))) for rank in range(4)]
    for batch, shares in zip(whole, zip(*parts, strict=True), strict=True):
        for column in (0, 1):
            rows = [share.batch[column][: share.rows.num] for share in shares]
            assert torch.cat(rows).tolist() == batch[column].tolist()
        assert all(len(share.batch[0]) >= 1 for share in shares)  # the last batch has 3 rows for 4 processes


def test_what_a_dataset_draws_differs_between_processes_and_stays_that_of_a_run_alone_in_the_first():
    batches = Streamed(Rows(), batch_size=4, device=CPU, seed=0, shuffle=True, num_workers=0)
    whole = next(iter(batches.epoch(0)))
    first, second = (next(iter(batches.epoch(0, shard=Shard(rank, 2)))).batch for rank in (0, 1))
    assert first[1].tolist() == whole[1][:2].tolist()
    assert second[0].tolist() == whole[0][2:].tolist() and second[1].tolist() != first[1].tolist()


class Shifted(nn.Module):
    num_draws = 2

    def forward(self, batch, draws):
        return batch[0] + draws[:, 0], batch[1] + draws[:, 1]


@pytest.mark.parametrize("loader", [0, 1])
def test_what_is_drawn_for_a_row_is_the_same_whoever_has_it(loader):
    batches = TransformedBatches(loaders()[loader], Shifted(), device=CPU, seed=5, is_training=True)
    whole = list(batches.epoch(2, first_batch=1))
    parts = [list(batches.epoch(2, first_batch=1, shard=Shard(rank, 2))) for rank in range(2)]
    for batch, shares in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.cat([share.batch[0][: share.rows.num] for share in shares]).tolist() == batch[0].tolist()


def test_a_sharded_loader_has_the_whole_ones_numbers():
    sharded = Sharded(loaders()[0], Shard(1, 2))
    assert (sharded.num_rows, sharded.batch_size, sharded.num_batches) == (23, 5, 5)
    assert [share.rows.num for share in sharded.epoch(0)] == [3, 3, 3, 3, 2]


def ends(num_rows=10):
    rows = (torch.arange(num_rows), torch.arange(num_rows))
    return FirstAndLast(Resident(rows, batch_size=4, device=CPU, seed=0, shuffle=False))


def test_first_and_smaller_last_batch():
    assert [found[0].tolist() for found in ends().epoch(0)] == [[0, 1, 2, 3], [8, 9]]
    assert (ends().num_rows, ends().num_batches, ends().batch_size) == (6, 2, 4)
    assert [found[0].tolist() for found in ends().epoch(0, first_batch=1)] == [[8, 9]]
    shares = [next(ends().epoch(0, shard=Shard(rank, 2))) for rank in (0, 1)]
    assert [share.batch[0].tolist() for share in shares] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_rows", [3, 8])
def test_first_batch_without_a_smaller_last(num_rows):
    assert len([*ends(num_rows).epoch(0)]) == ends(num_rows).num_batches == 1
    assert ends(num_rows).num_rows == min(num_rows, 4)
