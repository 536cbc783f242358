"""What a careful hand reaches: resident tensors, fused Adam, a preallocated metric tensor that a thread sends to MLflow.

--variant compiled: a step is one compiled function.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from work import Clock, Work, accuracy, adam, arguments, network, tell, tensors

ROWS_AT_ONCE = 100  # that the thread gets


def main() -> None:
    work = arguments()
    clock = Clock(work)
    model = network(work).to(work.device)
    metrics = torch.zeros(work.steps, 2, device=work.device)
    filled: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    writer = threading.Thread()
    if work.log_every:
        from mlflow import MlflowClient  # it, and a new store, take seconds that the training is not to be blamed for

        client = MlflowClient(work.uri)
        writer = threading.Thread(target=write, args=(work, client, metrics, filled))
        writer.start()
    train(work, model, clock, metrics, filled.put)
    if work.log_every:
        filled.put(None)
        writer.join()
    tell(work, clock, model)


def train(
    work: Work, model: nn.Module, clock: Clock, metrics: Tensor, hand_over: Callable[[tuple[int, int]], None]
) -> None:
    inputs, targets = (part.to(work.device) for part in tensors(work))
    optimizer = adam(model)
    rows_of = list(metrics)  # the views, made once

    def learn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        return loss.detach(), accuracy(logits, y)

    if work.variant == "compiled":
        learn = torch.compile(learn)
    step = 0
    clock.begin()
    while step < work.steps:
        for rows in torch.randperm(len(inputs)).to(work.device).split(work.batch_size):
            clock.tick()
            torch.stack(learn(inputs[rows], targets[rows]), out=rows_of[step])
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if work.log_every and (step % ROWS_AT_ONCE == 0 or step == work.steps):
                hand_over(((step - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE, step))
            if step == work.steps:
                break
    clock.end()


def write(work: Work, client: Any, metrics: Tensor, filled: SimpleQueue[tuple[int, int] | None]) -> None:
    """Sends rows of the metrics to a run of its own, until there is None."""
    from mlflow.entities import Metric

    run_id = client.create_run("0").info.run_id
    while (part := filled.get()) is not None:
        now = int(time.time() * 1000)
        points = [
            Metric(name, value, now, step)
            for step, row in enumerate(metrics[slice(*part)].tolist(), start=part[0] + 1)
            if work.is_logged(step)
            for name, value in zip(("train/loss", "train/accuracy"), row, strict=True)
        ]
        client.log_batch(run_id, metrics=points)
    client.set_terminated(run_id)


main()
