"""The loop of textbooks: DataLoader, `.item()` and `mlflow.log_metrics`."""

from __future__ import annotations

import mlflow
import torch
from torch.nn import functional as F
from work import LEARNING_RATE, Clock, Work, accuracy, arguments, loader, network, tell


def main() -> None:
    work = arguments()
    clock = Clock(work)
    model = network(work).to(work.device)
    if work.log_every:
        mlflow.set_tracking_uri(work.uri)
        with mlflow.start_run():
            train(work, model, clock)
    else:
        train(work, model, clock)
    tell(work, clock, model)


def train(work: Work, model: torch.nn.Module, clock: Clock) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    batches = loader(work)
    clock.begin()
    for step, (x, y) in enumerate(batches, start=1):
        clock.tick()
        x, y = x.to(work.device), y.to(work.device)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if work.is_logged(step):
            mlflow.log_metrics({"train/loss": loss.item(), "train/accuracy": accuracy(logits, y).item()}, step=step)
    clock.end()


main()
