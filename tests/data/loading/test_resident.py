import threading
from typing import Any, NamedTuple

import pytest
import torch

from runner.data.loading import batches as room
from runner.data.loading import order
from runner.data.loading.batches import Resident
from runner.data.loading.order import permutation
from runner.device.placement import tensors

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    y: Any


def rows(count):
    return torch.arange(float(count))[:, None], torch.arange(count)


def loader(rows, size=10, shuffle=True, seed=0):
    return Resident(rows, batch_size=size, device=CPU, seed=seed, shuffle=shuffle)


def numbers(batches):
    return [y.tolist() for _, y in batches]


def flat(batches):
    return [number for batch in numbers(batches) for number in batch]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "size"), [(53, 10), (50, 10), (7, 10), (10, 10), (3000, 2), (5, 1)])
def test_epoch_has_each_row_once(count, size, shuffle):
    batches = loader(rows(count), size, shuffle)
    found = list(batches.epoch(4))
    assert len(found) == batches.num_batches
    assert [len(y) for _, y in found] == [size] * (count // size) + ([count % size] if count % size else [])
    assert sorted(flat(found)) == list(range(count))
    assert all(x[:, 0].tolist() == y.tolist() for x, y in found), "a row stays together"


def test_the_order_is_the_epochs_permutation():
    assert flat(loader(rows(53)).epoch(4)) == permutation(53, seed=0, epoch=4).tolist()
    assert flat(loader(rows(53), shuffle=False).epoch(4)) == list(range(53))
    assert numbers(loader(rows(53)).epoch(4)) != numbers(loader(rows(53)).epoch(5))
    assert numbers(loader(rows(53)).epoch(4)) != numbers(loader(rows(53), seed=1).epoch(4))


@pytest.mark.parametrize("gather_bytes", [1, 500, 10**6])
def test_size_of_gather_keeps_the_batches(gather_bytes, monkeypatch):
    expected = [numbers(loader(rows(533)).epoch(4, first_batch=3)), numbers(loader(rows(533), shuffle=False).epoch(0))]
    monkeypatch.setitem(room.GATHER_BYTES, "cpu", gather_bytes)
    found = [numbers(loader(rows(533)).epoch(4, first_batch=3)), numbers(loader(rows(533), shuffle=False).epoch(0))]
    assert found == expected


def test_size_of_gather_is_bounded():
    """In bytes for large rows, but at least one batch."""
    wide = torch.zeros(300, 10_000)
    sizes = {batch.untyped_storage().nbytes() for batch in loader(wide, 10).epoch(0)}
    assert max(sizes) <= 2**20
    big = {batch.untyped_storage().nbytes() for batch in loader(wide, 100).epoch(0)}
    assert big == {100 * 10_000 * 4}


def test_resident_epoch_keeps_random_state():
    before = torch.get_rng_state()
    list(loader(rows(53)).epoch(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_may_be_overwritten(shuffle):
    data = rows(20)
    batches = loader(data, shuffle=shuffle)
    with torch.inference_mode():
        for x, y in batches.epoch(0):
            x.zero_()
            y.zero_()
    assert data[1].tolist() == list(range(20))
    assert sorted(flat(batches.epoch(0))) == list(range(20))


def test_set_on_its_device_is_not_copied():
    data = rows(20)
    assert loader(data)._rows is data


NESTED = {
    "tensor": (lambda x, y: x, torch.Tensor),
    "dict": (lambda x, y: {"x": x, "y": y}, dict),
    "list": (lambda x, y: [x, y], list),
    "named tuple": (Pair, Pair),
    "nested tuple": (lambda x, y: ({"a": x, "b": x}, y), tuple),
    "with others": (lambda x, y: (x, None, y), tuple),
    "one": (lambda x, y: (x,), tuple),
}


@pytest.mark.parametrize(("make", "kind"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("shuffle", [True, False])
def test_nested_rows_give_nested_batches(make, kind, shuffle):
    batches = list(loader(make(*rows(25)), shuffle=shuffle).epoch(0))
    assert {type(batch) for batch in batches} == {kind}
    assert [len(tensors(batch)[0]) for batch in batches] == [10, 10, 5]
    assert all(len({tuple(part.flatten().int().tolist()) for part in tensors(batch)}) == 1 for batch in batches)
    assert sorted(torch.cat([tensors(batch)[0] for batch in batches]).int().flatten().tolist()) == list(range(25))


def test_two_epochs_run_at_the_same_time():
    batches = loader(rows(53))
    assert [numbers([a]) for a, _ in zip(batches.epoch(1), batches.epoch(2), strict=True)] == [
        numbers([a]) for a in batches.epoch(1)
    ]
    batches.close()


def test_next_order_is_drawn_in_a_thread(monkeypatch):
    drawn = []

    def draw(count, *, seed, epoch):
        drawn.append((epoch, threading.current_thread() is threading.main_thread()))
        return permutation(count, seed=seed, epoch=epoch)

    expected = [numbers(loader(rows(53)).epoch(epoch)) for epoch in (0, 1, 2, 7)]
    monkeypatch.setattr(order, "permutation", draw)
    monkeypatch.setattr(order, "MANY_ROWS", 53)
    batches = loader(rows(53))
    assert [numbers(batches.epoch(epoch)) for epoch in (0, 1, 2, 7)] == expected
    batches.close()
    assert sorted(drawn) == [(0, True), (1, False), (2, False), (3, False), (7, True), (8, False)]
    drawn.clear()
    numbers(loader(rows(52)).epoch(0))
    assert drawn == [(0, True)]
