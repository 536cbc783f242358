"""Optimizers that compute the loss several times in a step, compared with the loop in torch's documentation."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS

from runner import cli
from runner.tracking.journal import read_points

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        one, two, outputs = None, None, []
        for value in x.split(1, dim=1):
            one = self.first(value, one)
            two = self.second(one[0], two)
            outputs.append(self.head(two[0]))
        return torch.cat(outputs, dim=1)

def waves(batch_size):
    starts = torch.arange(0, 36, 4)[:, None]
    x = torch.sin((starts + torch.arange(25)) / 5.0)
    return DataLoader(TensorDataset(x), batch_size=batch_size)

def loss(model, batch):
    x = batch[0]
    return F.mse_loss(model(x[:, :-1]), x[:, 1:])
"""
WORDS = [
    *("model=net", "data._target_=waves.waves", "task=own", "task.function._target_=waves.loss", "device=cpu"),
    *("optimizer._target_=torch.optim.LBFGS", "optimizer.lr=0.8", "+optimizer.max_iter=5", "seed=3"),
    *("tracking.enabled=false", "hydra.run.dir=run", "train.checkpoint_every_steps=1"),
]


@pytest.fixture
def waves(own_folder):
    Path("waves.py").write_text(PROGRAM)
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/net.yaml").write_text("_target_: waves.Sequence\n")


def by_hand(batch_size, num_steps):
    import waves

    torch.manual_seed(3)
    model, losses = waves.Sequence(), []
    optimizer = LBFGS(model.parameters(), lr=0.8, max_iter=5)
    while len(losses) < num_steps:
        for (x,) in waves.waves(batch_size):

            def closure(x=x):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
                loss.backward()
                return loss.detach()

            losses.append(float(optimizer.step(closure)))
            if len(losses) == num_steps:
                break
    return losses, nn.utils.parameters_to_vector(model.parameters())


def test_lbfgs_resumed_equals_the_hand_loop(waves):
    words = [*WORDS, "+data.batch_size=4"]
    assert cli.main([*words, "train.num_steps=2"]) == 0
    assert cli.main(["resume", "run", "train.num_steps=5"]) == 0
    losses, weights = by_hand(4, 5)
    assert [value for _, value in read_points(Path("run"))["train/loss"]] == losses
    state = torch.load("run/checkpoints/last.pt", weights_only=True)["model"]
    assert torch.equal(torch.cat([value.flatten() for value in state.values()]), weights)
