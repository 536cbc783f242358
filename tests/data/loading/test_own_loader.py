"""A user's DataLoader whose processes each read a part of an IterableDataset: no row of an epoch is silently lost."""

import logging
import re

import pytest
import torch
from refused import problems_of
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from runner.data.loading.own_loader import OwnLoader, Served

CPU = torch.device("cpu")


class Parts(IterableDataset):
    """Rows 0, 1, 2, ..., a part for each process. says: The reported length, if it differs."""

    def __init__(self, num=18, *, says=None, shares=True):
        self.num, self.says, self.shares = num, says or num, shares

    def __len__(self):
        return self.says

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info and self.shares else (0, 1)
        return iter((torch.tensor([float(row)]), row) for row in range(first, self.num, step))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


def own_collate(rows):
    return default_collate(rows)


def served(dataset, **settings):
    return Served(OwnLoader(DataLoader(dataset, **settings), setting="data=mine"), batch_size=1, device=CPU, seed=0)


def rows_of(batches):
    return [targets.tolist() for _, targets in batches.epoch(0)]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_row_comes_once(num_workers, caplog):
    batches = served(Parts(), batch_size=4, num_workers=num_workers)
    found = rows_of(batches)
    assert sorted(row for rows in found for row in rows) == list(range(18)) and not caplog.messages
    assert [len(rows) for rows in found] == [4, 4, 4, 4, 2] and batches.num_batches == 5


@pytest.mark.parametrize(
    ("dataset", "settings", "told"),
    [
        (Parts(says=8), {}, r"Parts has more than its length of 2 batches: .* define `__len__`"),
        (Parts(), {"num_workers": 2, "collate_fn": own_collate}, r"5 batches: .*get_worker_info\(\).* 2 processes"),
        (Parts(shares=False), {"num_workers": 2}, r"5 batches: the others are left out .*get_worker_info"),
    ],
)
def test_rows_left_out_are_reported_once(dataset, settings, told, caplog):
    batches = served(dataset, batch_size=4, **settings)
    with caplog.at_level(logging.WARNING, logger="runner"):
        assert len(rows_of(batches)) == len(rows_of(batches)) == batches.num_batches
    (message,) = caplog.messages
    assert re.search(told, message)


def test_loader_without_length_counts_rows_of_batches():
    own = OwnLoader(DataLoader(Endless(), batch_size=4), setting="data=mine")
    own.lasts(5, batch_size=1)
    assert (len(own), own.num_batches(1), own.has_length) == (20, 5, False)
    assert own.fingerprint.split() == ["Endless"]


def test_processes_that_drop_rows_are_named(messages):
    messages(problems_of(rows_of, served(Parts(22), batch_size=4, num_workers=2, drop_last=True)))
