"""What a careful hand reaches: resident tensors, fused Adam, a preallocated metric tensor, no tracking at all."""

from __future__ import annotations

import time

import torch
from torch.nn import functional as F
from work import BATCH_SIZE, LEARNING_RATE, arguments, arrays, network, tell


def main() -> None:
    work = arguments()
    inputs, targets = map(torch.from_numpy, arrays())
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    num_steps = -(-len(inputs) // BATCH_SIZE) * work.epochs
    metrics = torch.zeros(num_steps, 2)
    step = 0
    began = time.perf_counter()
    for _ in range(work.epochs):
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            x, y = inputs[rows], targets[rows]
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                metrics[step, 0] = loss
                metrics[step, 1] = (logits.argmax(1) == y).float().mean()
            step += 1
    seconds = time.perf_counter() - began
    tell(num_steps=step, seconds=seconds, points=0, loss=metrics[-1, 0].item())


main()
