"""train.recompute: bitwise identical numbers with less memory, whatever the modules draw and count."""

import copy
import random
from collections import Counter

import pytest
import torch
from refused import problems_of
from torch import nn

from runner.training.recompute import recompute, repeated

CPU = torch.device("cpu")


#: forward passes by module
PASSES = Counter()


class Block(nn.Module):
    """Draws from torch and from Python; counts like a norm; carries a state from batch to batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.calls, self.carried = 0, None

    def forward(self, x, scale=1.0):
        PASSES[self] += 1
        self.calls += 1
        x = x + scale * random.random() * self.dropout(self.norm(self.layer(x))).relu()
        x = x if self.carried is None else x + (x * self.carried / self.calls).tanh()
        self.carried = x.detach().mean(0)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.output = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.output(x)


def trained(*patterns, num=3):
    torch.manual_seed(0)
    model = Net()
    recompute(model, patterns, device=CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for _ in range(num):
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, torch.stack(losses), (torch.rand(1), random.random())


@pytest.mark.parametrize("patterns", [["blocks.*"], ["blocks"], ["blocks.1"], ["*"], ["blocks.*.norm", "output"]])
def test_recompute_is_bitwise_identical(patterns):
    plain, losses, after = trained()
    model, found, drawn = trained(*patterns)
    assert torch.equal(found, losses) and drawn == after
    assert [block.calls for block in model.blocks] == [3, 3, 3]
    assert all(
        torch.equal(*pair) for pair in zip(*([b.carried for b in m.blocks] for m in (plain, model)), strict=True)
    )
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


def test_recompute_runs_outermost_modules_twice():
    model, _, _ = trained("blocks.*", num=1)
    assert [PASSES[block] for block in model.blocks] == [2, 2, 2]
    model, _, _ = trained("blocks.1", num=1)
    assert [PASSES[block] for block in model.blocks] == [1, 2, 1]
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert [PASSES[block] for block in model.blocks] == [2, 3, 2]


class InPlace(nn.Module):
    """Counts in a buffer, or keeps values in a list."""

    def __init__(self, keeps):
        super().__init__()
        self.layer, self.keeps = nn.Linear(8, 8), keeps
        self.register_buffer("total", torch.ones(8))
        self.values = []

    def forward(self, x):
        if self.keeps:
            self.values.append(x.detach())
        else:
            self.total += x.detach().mean(0)
        return self.layer(x) * self.total


@pytest.mark.parametrize(("keeps", "name"), [(True, "values"), (False, "total")])
def test_module_that_changes_in_place_is_refused(keeps, name):
    model = nn.Sequential(nn.Linear(8, 8), InPlace(keeps))
    recompute(model, ["1"], device=CPU)
    (problem,) = problems_of(model, torch.ones(2, 8))
    assert f"`InPlace.{name}` in place" in problem.message and "leave the module out" in problem.help


def test_recompute_copy_keeps_module_names():
    model, _, _ = trained("blocks.*", num=1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.output.weight.zero_()
        other.blocks[0].layer.weight.zero_()
    assert model.blocks[0].layer.weight.any()
    assert [*other.state_dict()] == [*Net().state_dict()]
    assert isinstance(model.blocks[0], Block) and type(model.blocks[0]).__name__ == "Block"


@pytest.mark.parametrize(
    ("pattern", "said"), [("block.*", "blocks"), ("layr", "blocks.0.layer"), ("nothing", "names that begin with")]
)
def test_recompute_unknown_path_suggests_nearest(pattern, said):
    problems = problems_of(recompute, Net(), [pattern], device=CPU)
    assert problems[0].source == f"train.recompute: {pattern}"
    assert said in problems[0].help


def test_recompute_paths_are_users_names():
    model = nn.ModuleDict({"model": Net()})
    recompute(model, ["blocks.0"], device=CPU, prefix="model.")
    assert type(model["model"].blocks[0]) is not Block and type(model["model"].blocks[1]) is Block


def test_the_blocks_of_a_model_are_found():
    assert repeated(Net()) == "blocks.*"
    assert repeated(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ""
