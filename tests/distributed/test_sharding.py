"""Sharded models: the blocks chosen automatically, the parts of each process, and whole states that fit any number of processes."""

import copy
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from runner.data.loading.batches import RowRange, Share
from runner.device.precision import make_precision
from runner.distributed.gradients import ShardedGradients
from runner.distributed.sharding import blocks, dividing
from runner.errors import RunnerError
from runner.training.optimizer import AveragedWeights
from runner.training.step.train_step import StepOptions, make_step
from runner.version import PACKAGES

CPU = torch.device("cpu")


class Blocks(nn.Module):
    """Odd sizes, so that parts differ in size; a tied weight, a norm with buffers, and a row of blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 5)
        self.row = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)) for _ in range(2)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)
        self.tied = nn.Linear(3, 5)
        self.tied.weight = self.stem.weight

    def forward(self, inputs):
        hidden = self.stem(inputs) + self.tied(inputs)
        for block in self.row:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden)).squeeze(1)


def by_parts(model, batch):
    """A task that never calls the whole model."""
    hidden = model.stem(batch) + model.tied(batch)
    for block in model.row:
        hidden = hidden + block(hidden)
    return {"loss": model.head(hidden).square().mean()}


def names_of(model, at_least):
    found = list(blocks(model, at_least=at_least))
    return [name for name, module in model.named_modules() if module in found]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)), nn.Linear(8, 1))


def test_what_stands_in_a_row_comes_together_by_itself():
    assert names_of(Nested(), at_least=20) == ["body.0", "body.1.0", "body.1.1"]
    assert names_of(Nested(), at_least=40) == ["body.1.1"]
    assert names_of(Blocks(), at_least=30) == ["row.0.0", "row.0.2", "row.1.0", "row.1.2"]
    assert names_of(nn.Linear(9, 9), at_least=1) == []


def test_what_is_used_elsewhere_too_belongs_to_no_block():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert names_of(model, at_least=1) == []


def shares(rank, num, *sizes):
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        batch, start, stop = torch.randn(size, 3, generator=generator), size * rank // num, size * (rank + 1) // num
        yield Share(batch[start:stop], RowRange(start, stop, stop - start, size))


def trained(model, task, *, steps, rank=0, num=1, divide=None, states=None):
    """Return the result of steps with two groups each. states: The initial (model, mean, optimizer)."""
    mean = copy.deepcopy(model)
    shards = divide([model, mean]) if divide else None
    average = AveragedWeights(model, decay=0.5, mean=mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    if states is not None and shards is not None:
        shards.load_model(model, states[0])
        shards.load_model(mean, states[1])
        shards.load_optimizer(optimizer, states[2])
    elif states is not None:
        for part, state in zip((model, mean, optimizer), states, strict=True):
            part.load_state_dict(state)
    step = make_step(
        model,
        shards.within(task) if shards else task,
        optimizer=optimizer,
        precision=make_precision("fp32", device=CPU),
        clip_grad_norm=0.1,
        average=average,
        options=StepOptions(own_batches=ShardedGradients(shards, task, num=num).own_batches if shards else None),
    )
    values = []
    for _ in range(steps):
        group = list(shares(rank, num, 6, 4))
        values.append(step(group if shards else [share.batch for share in group]))
    whole = shards.whole if shards else (lambda tree: tree)
    states = whole((model.state_dict(), mean.state_dict(), optimizer.state_dict()))
    return values, copy.deepcopy(states), (model, optimizer)


def work(rank, num, port, folder):
    """Run one of the processes of the test below."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num)
    divide = dividing(CPU, num)
    more = {"rank": rank, "num": num, "divide": lambda models: divide(models, block=40)}
    values, states, (model, optimizer) = trained(Blocks(), by_parts, steps=3, **more)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    held_state = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
    torch.save((held, held_state), folder / f"held-{rank}.pt")
    # every process reads what the first one has written, like a checkpoint
    if rank == 0:
        torch.save((values, states), folder / "three.pt")
    distributed.barrier()
    _, saved = torch.load(folder / "three.pt")
    later, more_states, _ = trained(Blocks(), by_parts, steps=2, states=saved, **more)
    if rank == 0:
        torch.save((later, more_states), folder / "five.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_training_equals_whole_and_resumes(tmp_path, warm):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    started = [
        warm.program([sys.executable, __file__, str(rank), str(port), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait() for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    expected, states, _ = trained(Blocks(), by_parts, steps=3)
    values, found = torch.load(tmp_path / "three.pt")
    torch.testing.assert_close(found, states)
    for now, then in zip(values, expected, strict=True):
        torch.testing.assert_close(now["grad_norm"], then["grad_norm"])
    later, more = torch.load(tmp_path / "five.pt")
    expected, states, _ = trained(Blocks(), by_parts, steps=2, states=states)
    torch.testing.assert_close(more, states)
    assert "loss" in later[0]
    held = [torch.load(tmp_path / f"held-{rank}.pt") for rank in range(2)]
    count = sum(parameter.numel() for parameter in Blocks().parameters())
    of_norm = 10  # the task does not use it
    for numbers, expected in zip(zip(*held, strict=True), (count, count - of_norm), strict=True):
        assert sum(numbers) == expected and max(numbers) < 0.65 * count  # odd sizes: the first process has more


@pytest.fixture
def alone():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield dividing(CPU, 1)
    distributed.destroy_process_group()


def test_new_averages_are_seen_after_a_measurement(alone):
    """An evaluation's gathered weights would hide them, as the averages change in place."""
    model, mean = Blocks(), Blocks()
    shards = alone([model, mean])
    average = AveragedWeights(model, decay=0.0, mean=mean)
    shards.load_model(model, {key: torch.zeros_like(value) for key, value in Blocks().state_dict().items()})
    judge = shards.within(by_parts)
    with torch.no_grad():
        before = judge(mean, torch.ones(2, 3))["loss"]
        shards.let_go()
        average.update()
        after = judge(mean, torch.ones(2, 3))["loss"]
    assert before != 0 and after == 0


def test_a_number_without_a_dimension_is_refused_by_its_name(alone):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(RunnerError, match=r"scale is a number without a dimension"):
        alone([model])


if __name__ == "__main__":
    work(int(sys.argv[1]), 2, int(sys.argv[2]), Path(sys.argv[3]))
