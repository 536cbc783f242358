"""The limit of a carefully written loop: resident tensors, fused Adam, and metrics in one tensor that a thread sends to MLflow.

--variant compiled: forward, loss and backward are one compiled function. graph: eight steps are one CUDA graph, and everything
that changes from step to step is on the device; without CUDA, the same steps one by one. compiled+graph: both.
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
from work import LEARNING_RATE, Clock, Work, accuracy, adam, arguments, network, tell, tensors

ROWS_AT_ONCE = 100  # per call to the thread
STEPS_A_REPLAY = 8
WARM_UPS = 3  # torch recommends it before a capture


def main() -> None:
    work = arguments()
    clock = Clock(work)
    model = network(work).to(work.device)
    metrics = torch.zeros(work.steps, 2, device=work.device)
    filled: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    writer = threading.Thread()
    if work.log_every:
        from mlflow import MlflowClient  # this import and a new store take seconds that are not part of the training

        client = MlflowClient(work.uri)
        writer = threading.Thread(target=write, args=(work, client, metrics, filled))
        writer.start()
    by_graphs = "graph" in work.variant
    (train_by_graphs if by_graphs else train)(work, model, clock, metrics, filled.put)
    if work.log_every:
        filled.put(None)
        writer.join()
    tell(work, clock, model)


def train(
    work: Work, model: nn.Module, clock: Clock, metrics: Tensor, hand_over: Callable[[tuple[int, int]], None]
) -> None:
    inputs, targets = (part.to(work.device) for part in tensors(work))
    optimizer = adam(model)
    rows_of = list(metrics)  # the views, created once
    learn = learning(model, is_compiled=work.variant == "compiled")
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


def train_by_graphs(
    work: Work, model: nn.Module, clock: Clock, metrics: Tensor, hand_over: Callable[[tuple[int, int]], None]
) -> None:
    """Train on whole batches only; the rest of an epoch is left out."""
    inputs, targets = (part.to(work.device) for part in tensors(work))
    num_rows, size = len(inputs) // work.batch_size * work.batch_size, work.batch_size
    order = torch.zeros(num_rows, dtype=torch.int64, device=work.device)
    place = torch.zeros((), dtype=torch.int64, device=work.device)  # the next batch's position in the order
    row = torch.zeros(1, dtype=torch.int64, device=work.device)  # the next row of the metrics
    offsets = torch.arange(size, device=work.device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=LEARNING_RATE, fused=True, capturable=work.device.type == "cuda"
    )
    learn = learning(model, is_compiled="compiled" in work.variant)

    def take() -> None:
        rows = order.index_select(0, place + offsets)
        found = learn(inputs.index_select(0, rows), targets.index_select(0, rows))
        metrics.index_copy_(0, row, torch.stack(found)[None])
        optimizer.step()
        optimizer.zero_grad()
        place.add_(size)
        row.add_(1)

    replays: dict[int, Callable[[], None]] = {}
    step = 0
    clock.begin()
    while step < work.steps:
        order.copy_(torch.randperm(len(inputs))[:num_rows])
        place.zero_()
        left = min(num_rows // size, work.steps - step)
        while left:
            num = 1 if step < WARM_UPS or left < STEPS_A_REPLAY else STEPS_A_REPLAY
            if step < WARM_UPS:
                warm(take, work.device)
            else:
                replays[num] = replays.get(num) or captured(take, num, work.device)
                replays[num]()
            for _ in range(num):
                clock.tick()
                step += 1
                if work.log_every and (step % ROWS_AT_ONCE == 0 or step == work.steps):
                    hand_over(((step - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE, step))
            left -= num
    clock.end()


def learning(model: nn.Module, *, is_compiled: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function of forward, loss and backward that returns the loss and the accuracy."""

    def learn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        return loss.detach(), accuracy(logits, y)

    return torch.compile(learn) if is_compiled else learn


def warm(take: Callable[[], None], device: torch.device) -> None:
    """Take a step on a separate stream, as torch recommends before a capture."""
    if device.type != "cuda":
        take()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        take()
    torch.cuda.current_stream().wait_stream(side)


def captured(take: Callable[[], None], num: int, device: torch.device) -> Callable[[], None]:
    """Return a function of `num` steps: one CUDA graph, or one step after the other without CUDA."""

    def several() -> None:
        for _ in range(num):
            take()

    if device.type != "cuda":
        return several
    graph = torch.cuda.CUDAGraph()
    # thread_local: the thread that sends the metrics may copy during the capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        several()
    return graph.replay


def write(work: Work, client: Any, metrics: Tensor, filled: SimpleQueue[tuple[int, int] | None]) -> None:
    """Send rows of the metrics to a new run, until the queue returns None."""
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
