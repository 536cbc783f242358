"""The plain training loop that runs are compared with, bit by bit: a run's default optimizer, and batches."""

import torch
from torch.nn import functional as F

from runner.data.builtin.scikit import digits
from runner.data.loading.order import permutation
from runner.data.split import split


def steps_of(model, batches):
    """Train, and yield the loss of each step and its outputs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
    for inputs, targets in batches:
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), outputs


def batches_of_digits(num_epochs, size=128):
    """Yield the batches of digits' training split as a run with seed 0 takes them."""
    rows = split(digits(), val_fraction=0.1, test_fraction=0.1, limit=None, seed=0).train
    for epoch in range(num_epochs):
        for indices in permutation(len(rows[1]), seed=0, epoch=epoch).split(size):
            yield rows[0][indices], rows[1][indices]
