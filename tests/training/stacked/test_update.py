"""The optimizer steps of several models: of weights without a dimension, and of complex weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.training.optimizer import AveragedWeights
from runner.training.schedule import Schedule
from runner.training.stacked.step import Lane, clip


class Scaled(nn.Module):
    """A model with a learned temperature and complex phases."""

    def __init__(self, start):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start))
        self.layer = nn.Linear(2, 3)
        self.phases = nn.Parameter(torch.full((3,), complex(start, 1.0)))

    def forward(self, inputs):
        return (self.scale * self.layer(inputs) * self.phases).real


def member(seed):
    torch.manual_seed(seed)
    model = Scaled(1.0 + seed)
    return SimpleNamespace(
        model=model,
        task=nn.Identity(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schedule=Schedule(),
        average=AveragedWeights(model, decay=0.5),
        device=torch.device("cpu"),
        precision=SimpleNamespace(autocast=None),
    )


@pytest.mark.parametrize("largest", [0.1, 1e9])
def test_lane_clips_and_averages_each_member(largest):
    rows, seeds = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), (0, 1)
    alone, together = [member(seed) for seed in seeds], [member(seed) for seed in seeds]
    norms = []
    for each in alone:
        each.model(rows).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(each.model.parameters(), largest))
        each.optimizer.step()
        each.average.update()
    lane = Lane(together, largest)
    for each in together:
        each.model(rows).square().sum().backward()
    assert torch.equal(clip([lane]), torch.stack(norms))
    lane.update()
    for one, other in zip(alone, together, strict=True):
        for mine, theirs in ((one.model, other.model), (one.average.model, other.average.model)):
            torch.testing.assert_close(theirs.state_dict(), mine.state_dict(), rtol=0, atol=0)
