"""A step of several processes, in a group of one: the wrapped model, the weight of a batch, and errors for unused parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from runner.data.loading.batches import RowRange, Share
from runner.device.precision import make_precision
from runner.distributed.environment import RankInfo
from runner.distributed.gradients import ShardedGradients, SharedGradients
from runner.distributed.group import PATIENCE, Group, join
from runner.errors import RunnerError
from runner.training.step.train_step import StepOptions, make_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Two(nn.Module):
    """Two layers; its task calls one or both of them, but never the whole model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.other = nn.Linear(3, 1), nn.Linear(3, 1)


def both(model, batch):
    return {"loss": (model.used(batch) + model.other(batch)).square().mean()}


def first(model, batch):
    return {"loss": model.used(batch).square().mean()}


def made(task, **settings):
    model = Two()
    together = SharedGradients(model, task, num=1, **{"unused_parameters": False, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(
        model,
        together.task,
        optimizer=optimizer,
        precision=make_precision("fp32", device=CPU),
        options=StepOptions(own_batches=together.own_batches),
    )
    return model, step


def shares(*rows):
    generator = torch.Generator().manual_seed(1)
    return [Share(torch.randn(count, 3, generator=generator), RowRange(0, count, count, count)) for count in rows]


def test_a_step_is_that_of_one_process_also_where_the_task_calls_parts_of_the_model():
    batches = shares(4, 2)
    model, step = made(both)
    alone = Two()
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    plain = make_step(alone, both, optimizer=own, precision=make_precision("fp32", device=CPU))
    for _ in range(3):
        told, expected = step(batches), plain([share.batch for share in batches])
        torch.testing.assert_close(told["loss"], expected["loss"])
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))


def test_a_batch_counts_by_its_rows_of_all():
    together = SharedGradients(Two(), both, num=1, unused_parameters=False)
    halves = [Share("a", RowRange(0, 2, 2, 4)), Share("b", RowRange(0, 1, 0, 6))]
    assert [(batch, weight) for batch, weight in together.own_batches(halves)] == [("a", 0.2), ("b", 0.0)]


def test_a_batch_counts_by_what_its_task_counts_in_all_processes(monkeypatch):
    class Counting:
        def num_counted(self, batch):
            return torch.tensor(batch)

        def __call__(self, model, batch):
            return both(model, batch)

    monkeypatch.setattr(distributed, "all_reduce", lambda of_all: of_all.add_(5))  # the count of another process
    shares = [Share(2, RowRange(0, 2, 2, 4)), Share(1, RowRange(0, 1, 1, 6)), Share(7, RowRange(0, 1, 0, 6))]
    with_ddp = SharedGradients(Two(), Counting(), num=1, unused_parameters=False)
    in_parts = ShardedGradients(SimpleNamespace(within=lambda task: task), Counting(), num=2)
    for together, num in ((with_ddp, 1), (in_parts, 2)):
        weights = [float(weight) for _, weight in together.own_batches(shares)]
        assert weights == pytest.approx([2 * num / 8, 1 * num / 8, 0])


def test_unused_parameters_need_a_setting():
    _, step = made(first)
    step(shares(4))
    with pytest.raises(RunnerError, match=r"placement\.unused_parameters=true"):
        step(shares(4))
    model, step = made(first, unused_parameters=True)
    before = model.used.weight.clone()
    step(shares(4))
    step(shares(4))
    assert not torch.equal(before, model.used.weight)


def test_gradients_lie_in_the_buckets_that_travel():
    """Copying them back and forth would double their memory."""
    model = Two()
    together = SharedGradients(model, both, num=1, unused_parameters=False)
    both_losses = together.task(model, torch.ones(2, 3))
    both_losses["loss"].backward()
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == 1


def test_tensors_of_a_kind_are_sent_together(monkeypatch):
    sent = []
    monkeypatch.setattr(distributed, "broadcast", lambda tensor, source: sent.append(tensor.numel()) or tensor.mul_(2))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(4))
    buffers = list(model.buffers())
    Group(0, 1, distributed.group.WORLD).broadcast_(buffers)
    assert sent == [14, 2]  # means and variances, and the two counts
    assert [float(buffer.flatten()[0]) for buffer in buffers] == [0.0, 2.0, 0.0] * 2


def test_nccls_patience_is_that_of_the_rest(monkeypatch):
    given = {}
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **more: given.update(more))
    monkeypatch.setattr(distributed, "new_group", lambda **more: None)
    monkeypatch.setattr(distributed, "rendezvous", lambda where: iter([(distributed.HashStore(), 0, 1)]))
    join(RankInfo(0, 1, 0, 1, "127.0.0.1", 0, "torchrun"), backend="nccl", device=CPU)
    assert given["timeout"] == PATIENCE
