import contextlib
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from runner.data.loading.batches import Resident
from runner.data.loading.streamed import Streamed, copied_ahead
from runner.device import streams

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

CPU = torch.device("cpu")
COUNT = 53


class Rows(Dataset):
    """The same rows as `rows()`, one by one, with a random number each."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index, torch.rand(()) + random.random() + np.random.rand()


def rows():
    return torch.arange(float(COUNT))[:, None], torch.arange(COUNT)


@pytest.fixture
def loader():
    with contextlib.ExitStack() as stack:

        def make(rows, *, kind=Streamed, size=10, seed=0, shuffle=True, **settings):
            made = kind(rows, batch_size=size, device=CPU, seed=seed, shuffle=shuffle, **settings)
            stack.callback(made.close)
            return made

        yield make


def plain(batches):
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("first", [0, 2, 6])
def test_streamed_batches_equal_resident_ones(loader, shuffle, first):
    expected = plain(loader(rows(), kind=Resident, shuffle=shuffle).epoch(3, first_batch=first))
    assert len(expected) == 6 - first
    for data, num_workers in ((rows(), 0), (Rows(), 0), (Rows(), 2)):
        streamed = loader(data, shuffle=shuffle, num_workers=num_workers)
        assert streamed.num_batches == 6
        found = plain(streamed.epoch(3, first_batch=first))
        assert [batch[:2] for batch in found] == expected


def test_draws_of_dataset_survive_restart_and_processes(loader):
    whole = plain(loader(Rows(), num_workers=0).epoch(2))
    workers = loader(Rows(), num_workers=2)
    assert plain(workers.epoch(2)) == whole
    assert plain(workers.epoch(2, first_batch=4)) == whole[4:]
    epochs = [{number for batch in plain(workers.epoch(epoch)) for number in batch[2]} for epoch in (2, 3)]
    assert [len(drawn) for drawn in epochs] == [COUNT, COUNT] and not epochs[0] & epochs[1]  # drawn again in each epoch


def test_processes_live_until_close(loader):
    streamed = loader(Rows(), num_workers=2)
    list(streamed.epoch(0))
    children = {child.pid for child in multiprocessing.active_children()}
    assert len(children) == 2
    list(streamed.epoch(1))
    assert {child.pid for child in multiprocessing.active_children()} == children
    streamed.close()
    streamed.close()
    assert not multiprocessing.active_children()
    assert len(list(streamed.epoch(2))) == 6, "a later epoch starts new ones"


def test_unfinished_epoch_ends_its_processes(loader):
    streamed = loader(Rows(), num_workers=2)
    for _ in streamed.epoch(0):
        break
    assert not multiprocessing.active_children()
    expected = plain(loader(rows(), kind=Resident).epoch(1))
    assert [batch[:2] for batch in plain(streamed.epoch(1))] == expected


def test_failed_epoch_ends_its_processes(loader):
    streamed = loader(Rows(), num_workers=1)
    with pytest.raises(ZeroDivisionError):
        for _ in streamed.epoch(0):
            1 / 0  # noqa: B018
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_epochs_run_at_the_same_time(loader, num_workers):
    streamed, resident = loader(Rows(), num_workers=num_workers), loader(rows(), kind=Resident)
    pairs = list(zip(streamed.epoch(1), streamed.epoch(2), strict=True))
    assert [batch[:2] for batch in plain(first for first, _ in pairs)] == plain(resident.epoch(1))
    assert [batch[:2] for batch in plain(second for _, second in pairs)] == plain(resident.epoch(2))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streamed_epoch_keeps_random_state(loader, num_workers):
    drawn = []
    for reads in (False, True):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        if reads:
            list(loader(Rows(), num_workers=num_workers).epoch(0))
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_batches_are_read_when_they_are_needed(loader):
    read = []

    class Told(Rows):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    batches = loader(Told(), num_workers=0).epoch(0)
    assert not read
    next(batches)
    assert read


class Log:
    """Replaces the device's streams and logs their calls: their order decides whether memory is reused safely."""

    def __init__(self, monkeypatch):
        self.said = []
        monkeypatch.setattr(streams, "use", self.stream)
        monkeypatch.setattr(streams, "current", lambda device: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.say("record", int(tensor[0])))
        self.inside = False

    def say(self, *words):
        self.said.append(" ".join(map(str, words)))

    @contextlib.contextmanager
    def stream(self, side):
        assert side == "side"
        self.inside = True
        yield
        self.inside = False

    def wait_stream(self, side):
        assert side == "side"
        self.say("wait")


def test_cuda_copies_next_batch_during_the_step(monkeypatch):
    log = Log(monkeypatch)

    def carry(batch, device, *, non_blocking):
        assert non_blocking
        assert log.inside, "copies run on the side stream"
        log.say("copy", int(batch["x"][0]))
        return batch

    monkeypatch.setattr("runner.data.loading.streamed.move", carry)
    batches = iter([{"x": torch.tensor([n]), "more": (torch.tensor([n]),)} for n in range(3)])
    for batch in copied_ahead(batches, torch.device("cuda:0"), side="side"):
        assert not log.inside, "steps run on the run's own stream"
        log.say("step", int(batch["x"][0]))
    ahead = "copy 0, wait, record 0, record 0, copy 1, step 0, wait, record 1, record 1, copy 2, step 1, wait, record 2, record 2, step 2"
    assert log.said == ahead.split(", ")


def test_cuda_copies_of_empty_epoch_are_empty(monkeypatch):
    Log(monkeypatch)
    assert list(copied_ahead(iter([]), torch.device("cuda:0"), side="side")) == []
