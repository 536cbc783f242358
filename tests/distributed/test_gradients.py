"""A step of several processes, in a group of one: what is wrapped, how much a batch counts, what is told of unused parameters."""

import pytest
import torch
from torch import distributed, nn

from runner.data.loading.shard import Rows, Share
from runner.device.backends import precision
from runner.distributed.gradients import SharedGradients
from runner.errors import RunnerError
from runner.training.step.train_step import StepOptions, make_step

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Two(nn.Module):
    """Two layers that its task calls, one of them or both; never the model as a whole."""

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
        precision=precision("fp32", device=CPU),
        options=StepOptions(own_batches=together.own_batches),
    )
    return model, step


def shares(*rows):
    generator = torch.Generator().manual_seed(1)
    return [Share(torch.randn(count, 3, generator=generator), Rows(0, count, count, count)) for count in rows]


def test_a_step_is_that_of_one_process_also_where_the_task_calls_parts_of_the_model():
    batches = shares(4, 2)
    model, step = made(both)
    alone = Two()
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    plain = make_step(alone, both, optimizer=own, precision=precision("fp32", device=CPU))
    for _ in range(3):
        told, expected = step(batches), plain([share.batch for share in batches])
        torch.testing.assert_close(told["loss"], expected["loss"])
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))


def test_a_batch_counts_by_its_rows_of_all():
    together = SharedGradients(Two(), both, num=1, unused_parameters=False)
    halves = [Share("a", Rows(0, 2, 2, 4)), Share("b", Rows(0, 1, 0, 6))]
    assert [(batch, weight) for batch, weight in together.own_batches(halves)] == [("a", 0.2), ("b", 0.0)]


def test_unused_parameters_are_told_with_the_key_that_allows_them():
    _, step = made(first)
    step(shares(4))
    with pytest.raises(RunnerError, match=r"placement\.unused_parameters=true"):
        step(shares(4))


def test_unused_parameters_are_allowed():
    model, step = made(first, unused_parameters=True)
    before = model.used.weight.clone()
    step(shares(4))
    step(shares(4))
    assert not torch.equal(before, model.used.weight)
