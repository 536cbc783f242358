"""The shares of several processes, the transform of batches, the first and last batch, and the orders of epochs."""

import pytest
import torch
from torch import nn

from runner.data.loading.batches import BatchTransform, FirstAndLast, Resident, Shard
from runner.data.loading.order import generator, mixed, permutation
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


def test_draws_of_dataset_differ_between_ranks():
    batches = Streamed(Rows(), batch_size=4, device=CPU, seed=0, shuffle=True, num_workers=0)
    whole = next(iter(batches.epoch(0)))
    first, second = (next(iter(batches.epoch(0, shard=Shard(rank, 2)))).batch for rank in (0, 1))
    assert first[1].tolist() == whole[1][:2].tolist()
    assert second[0].tolist() == whole[0][2:].tolist() and second[1].tolist() != first[1].tolist()


class Shifted(nn.Module):
    """Adds its buffer and, in training, the row's draws."""

    num_draws = 2

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor([10.0]))

    def forward(self, batch, draws):
        x, y = batch
        return x * 0 + self.shift + (draws.sum(1) if self.training else 0), y


def transformed(loader=0, *, seed=5, is_training=True):
    batches = loaders(shuffle=is_training)[loader]
    batches.transform = BatchTransform(Shifted(), device=CPU, seed=seed, is_training=is_training)
    return batches


def all_of(batches, number, **settings):
    return [(x.tolist(), y.tolist()) for x, y in batches.epoch(number, **settings)]


@pytest.mark.parametrize("loader", [0, 1])
def test_draws_depend_on_seed_epoch_and_position(loader):
    whole, batches = all_of(transformed(), 2), transformed(loader)
    assert [all_of(batches, 2, first_batch=first) for first in range(6)] == [whole[first:] for first in range(6)]
    drawn = [x for x, _ in whole]
    assert drawn != [x for x, _ in all_of(batches, 3)] and drawn != [x for x, _ in all_of(transformed(seed=6), 2)]
    values = torch.cat([x for x, _ in batches.epoch(2)])
    assert len(values.unique()) == 23 and ((values > 10) & (values < 12)).all()
    parts = [list(batches.epoch(2, first_batch=1, shard=Shard(rank, 2))) for rank in range(2)]
    for batch, shares in zip(whole[1:], zip(*parts, strict=True), strict=True):
        assert torch.cat([share.batch[0][: share.rows.num] for share in shares]).tolist() == batch[0]


def test_nothing_is_drawn_outside_training():
    assert {value for x, _ in all_of(transformed(is_training=False), 0) for value in x} == {10.0}


def test_module_counts_as_bytes_on_device():
    assert transformed().device_bytes == loaders()[0].device_bytes + 4


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


def test_order_depends_only_on_seed_and_epoch():
    torch.manual_seed(1)
    first = permutation(50, seed=3, epoch=2)
    torch.manual_seed(2)
    assert torch.equal(first, permutation(50, seed=3, epoch=2))
    assert sorted(first.tolist()) == list(range(50))


def test_order_is_fixed_by_the_seed():
    """A change here changes every existing run."""
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 7, 2, 0, 1, 3, 5, 6]
    assert permutation(8, seed=0, epoch=1).tolist() == [6, 1, 5, 4, 2, 0, 3, 7]


def test_neighbouring_seeds_and_epochs_share_no_order():
    orders = {tuple(permutation(30, seed=seed, epoch=epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_all_bits_of_a_seed_count():
    """torch's CPU generator uses only the low 32 bits of its seed."""
    plain = [torch.randperm(30, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2**32 + 1)]
    assert torch.equal(*plain)
    assert not torch.equal(permutation(30, seed=1, epoch=0), permutation(30, seed=2**32 + 1, epoch=0))


def test_mixed_numbers_are_seeds():
    found = [mixed(a, b) for a in (0, 1, 2**63 - 1) for b in (0, 1, 2, 10**9)]
    assert len({seed % 2**32 for seed in found}) == len(found)
    assert all(0 <= seed < 2**63 for seed in found)
    assert mixed(1, 2) != mixed(2, 1)
    assert generator(1, 2).initial_seed() == mixed(1, 2)
