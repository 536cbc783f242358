import multiprocessing
import os

import pytest
import torch
from refused import problems_of
from torch.utils.data import Dataset

from runner.data.loading import loaders
from runner.data.loading.batches import Shard
from runner.data.loading.loaders import Loading, Resident, Streamed, automatic_workers, load
from runner.data.sampler import sampler_of
from runner.data.source import from_arrays

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
ROWS = torch.zeros(1024, 256), torch.zeros(1024, dtype=torch.int64)  # 1 MiB and 8 KiB
LARGE = torch.zeros(1).expand(2**30)  # 4 GiB that take no memory
WIDE = torch.zeros(1, dtype=torch.float64).expand(2**30 - 1)  # less than 4 GiB as float32
SIZE = 1024 * 256 * 4 + 1024 * 8


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch):
    monkeypatch.setattr(loaders, "free_room", lambda: None)


class Rows(Dataset):
    def __len__(self):
        return 3


def made(rows, residency="auto", device=CPU, free_bytes=None, **settings):
    loading = Loading(residency, free_bytes, **settings)
    return load(rows, loading, batch_size=10, device=device, seed=0, shuffle=True)


@pytest.fixture
def pretended(monkeypatch):
    """Replace the loaders by their names: the choice needs no GPU."""
    for kind in (Resident, Streamed):
        monkeypatch.setattr(f"runner.data.loading.loaders.{kind.__name__}", lambda *args, kind=kind, **settings: kind)


CHOICES = [
    ("cpu", ROWS, "auto", None, Resident, "on the device (auto: 1.01 MiB)"),
    ("cpu", ROWS, "auto", 22 * 2**30, Resident, "on the device (auto: 1.01 MiB of 22 GiB free)"),
    ("cpu", ROWS, "auto", 1000, Resident, "on the device (auto: 1.01 MiB are in the CPU's memory already)"),
    ("cpu", ROWS, "device", 1000, Resident, "on the device (as asked)"),
    ("cpu", ROWS, "stream", None, Streamed, "streamed (as asked)"),
    ("cuda:0", ROWS, "auto", None, Resident, "on the device (auto: 1.01 MiB)"),
    ("cuda:0", ROWS, "auto", 2 * SIZE, Resident, "on the device (auto: 1.01 MiB of 2.02 MiB free)"),
    ("cuda:0", ROWS, "auto", 2 * SIZE - 1, Streamed, "streamed (auto: 1.01 MiB is over half of the 2.02 MiB free)"),
    ("cuda:0", ROWS, "device", SIZE, Resident, "on the device (as asked)"),
    ("cuda:0", ROWS, "stream", 2**40, Streamed, "streamed (as asked)"),
    ("cuda:0", ROWS[1], "auto", 2**40, Resident, "on the device (auto: 8 KiB of 1 TiB free)"),
    ("cuda:0", Rows(), "auto", 2**40, Streamed, "streamed (a Dataset is read row by row)"),
    (
        "mps",
        LARGE,
        "auto",
        2**40,
        Streamed,
        "streamed (auto: a tensor of 4 GiB, and mps ends a process that has one of 4 GiB)",
    ),
    ("mps", LARGE[:-1], "auto", 2**40, Resident, "on the device (auto: 4 GiB of 1 TiB free)"),
    ("mps", WIDE, "auto", 2**40, Resident, "on the device (auto: 8 GiB of 1 TiB free)"),
    ("mps", [LARGE[:-1], LARGE[:-1]], "auto", 2**40, Resident, "on the device (auto: 8 GiB of 1 TiB free)"),
    ("cuda:0", LARGE, "auto", 2**40, Resident, "on the device (auto: 4 GiB of 1 TiB free)"),
    ("cpu", Rows(), "stream", 2**40, Streamed, "streamed (a Dataset is read row by row)"),
]


@pytest.mark.parametrize(("device", "rows", "residency", "free", "kind", "reason"), CHOICES)
def test_residency_is_chosen_with_a_reason(pretended, device, rows, residency, free, kind, reason):
    assert made(rows, residency, torch.device(device), free) == (kind, reason)


@pytest.mark.parametrize(("rows", "residency", "free"), [(ROWS, "device", SIZE - 1), (LARGE, "device", None)])
def test_residency_that_does_not_fit_is_refused(rows, residency, free, messages):
    messages(problems_of(made, rows, residency, torch.device("mps") if rows is LARGE else CUDA, free))


def test_workers_are_not_used_for_tensors(pretended):
    _, reason = made(ROWS, "stream", num_workers=2)
    assert reason == "streamed (as asked); rows in memory need no worker processes"


class Numbered(Dataset):
    """Row i contains i."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


@pytest.mark.parametrize("many_rows", [2**20, 1])
def test_sampler_draws_the_same_for_every_loader(many_rows, monkeypatch):
    """many_rows: The number of rows from which the next order is drawn in advance."""
    monkeypatch.setattr("runner.data.loading.order.MANY_ROWS", many_rows)
    rows = torch.arange(53.0)[:, None], torch.arange(53)
    named = from_arrays(torch.zeros(53, 1), ["rare"] * 3 + ["usual"] * 50, name="rows")
    sampler = sampler_of("balanced", named.labels, named)
    expected = [sampler.order(seed=0, epoch=epoch) for epoch in range(3)]
    assert all(15 < int((order < 3).sum()) < 40 for order in expected)
    for data, where in ((rows, "device"), (rows, "stream"), (Numbered(), "auto")):
        settings = {"batch_size": 10, "device": CPU, "seed": 0, "shuffle": True, "sampler": sampler}
        batches, _ = load(data, Loading(where, num_workers=0), **settings)
        assert batches.num_batches == 6
        for epoch, order in enumerate(expected):
            whole = [list(numbers) for numbers in order.split(10)]
            for first in (0, 4):
                found = list(batches.epoch(epoch, first_batch=first))
                assert [list(numbers) for _, numbers in found] == whole[first:]
                assert all(x[:, 0].tolist() == numbers.tolist() for x, numbers in found)
            parts = [batches.epoch(epoch, shard=Shard(rank, 2)) for rank in range(2)]
            shared = [torch.cat([each.batch[1] for each in shares]) for shares in zip(*parts, strict=True)]
            assert torch.equal(torch.cat(shared), order)
        if where == "device":
            indexed = batches.indexed()
            indexed.begin(2)
            assert torch.equal(indexed.gather(torch.arange(53))[1], expected[2])
        batches.close()


@pytest.mark.parametrize(
    ("cpus", "num_processes", "workers"),
    [(1, 1, 1), (2, 1, 2), (16, 1, 4), (16, 4, 4), (16, 8, 2), (2, 2, 1), (2, 8, 1)],
)
def test_workers_share_the_cpus_of_a_machine(cpus, num_processes, workers, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus), raising=False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "fork")
    assert automatic_workers(Rows(), num_processes) == workers


@pytest.mark.parametrize(
    ("cpus", "num_rows", "is_training", "workers"),
    [(8, 10, True, 2), (8, 10, False, 0), (8, 1000, False, 1), (1, 1000, True, 1), (1, 1000, False, 1)],
)
@pytest.mark.parametrize("chosen", [None, "forkserver"])
def test_fresh_workers_are_few(cpus, num_rows, is_training, workers, chosen, monkeypatch):
    """As on macOS, where each process takes seconds to start, and each of the three splits has its processes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus), raising=False)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: chosen)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn", "fork"])
    monkeypatch.setattr(Rows, "__len__", lambda self: num_rows)
    assert automatic_workers(Rows(), is_training=is_training) == workers
    given = []
    monkeypatch.setattr(loaders, "Streamed", lambda *rows, num_workers, **settings: given.append(num_workers))
    load(Rows(), Loading(), batch_size=10, device=CPU, seed=0, shuffle=is_training)
    assert given == [workers]
