"""Accelerate: its calls around the textbook's loop, `accelerator.log` and its MLflow tracker."""

from __future__ import annotations

import mlflow
from accelerate import Accelerator
from torch.nn import functional as F
from work import Clock, accuracy, adam, arguments, loader, network, tell


def main() -> None:
    work = arguments()
    clock = Clock(work)
    accelerator = Accelerator(cpu=work.device.type == "cpu", log_with="mlflow" if work.log_every else None)
    if work.log_every:
        mlflow.set_tracking_uri(work.uri)
        accelerator.init_trackers("bench")
    model = network(work)
    prepared, optimizer, batches = accelerator.prepare(model, adam(model), loader(work))
    clock.begin()
    for step, (x, y) in enumerate(batches, start=1):
        clock.tick()
        logits = prepared(x)
        loss = F.cross_entropy(logits, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if work.is_logged(step):
            accelerator.log({"train/loss": loss.item(), "train/accuracy": accuracy(logits, y).item()}, step=step)
    clock.end()
    accelerator.end_training()
    tell(work, clock, model)


main()
