"""The loop that textbooks teach: DataLoader, `.item()` and `mlflow.log_metrics` in each step."""

from __future__ import annotations

import logging
import os
import time

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from work import BATCH_SIZE, LEARNING_RATE, arguments, arrays, network, tell


def main() -> None:
    work = arguments()
    logging.getLogger("alembic").setLevel(logging.ERROR)
    mlflow.set_tracking_uri(f"sqlite:///{work.store}")
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, arrays())), batch_size=BATCH_SIZE, shuffle=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    step = 0
    with mlflow.start_run():
        began = time.perf_counter()
        for _ in range(work.epochs):
            for x, y in loader:
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                accuracy = (logits.argmax(1) == y).float().mean().item()
                mlflow.log_metrics({"train/loss": loss.item(), "train/accuracy": accuracy}, step=step)
                if step == work.most_steps:
                    break
            if step == work.most_steps:
                break
        seconds = time.perf_counter() - began
    tell(num_steps=step, seconds=seconds, points=2 * step, loss=loss.item())


main()
