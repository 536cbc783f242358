"""The lower bound of a run's time: torch, MLflow, the same rows and steps, everything logged once at the end. One file.

`python tests/bench/peers/bare.py --data rows.npz --store mlflow.db`, rows.npz with x (N, 64) and y (N,).
"""

from __future__ import annotations

import argparse
import json
import time

import mlflow
import numpy as np
import torch
from mlflow.entities import Metric
from torch import nn
from torch.nn import functional as F


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with np.load(given.data) as rows:
        inputs, targets = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    metrics = torch.zeros(given.steps, 2)
    began = time.perf_counter()
    for step in range(given.steps):
        if step * 128 % len(inputs) < 128:
            order = torch.randperm(len(inputs))
        start = step * 128 % len(inputs)
        rows = order[start : start + 128]
        x, y = inputs[rows], targets[rows]
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics[step, 0], metrics[step, 1] = loss.detach(), (logits.detach().argmax(1) == y).float().mean()
    seconds = time.perf_counter() - began
    log(metrics, f"sqlite:///{given.store}")
    print(json.dumps({"num_steps": given.steps, "seconds": seconds, "points": 2 * given.steps, "loss": loss.item()}))


def log(metrics: torch.Tensor, uri: str) -> None:
    mlflow.set_tracking_uri(uri)
    now = int(time.time() * 1000)
    points = [
        Metric(name, value, now, step)
        for step, row in enumerate(metrics.tolist(), start=1)
        for name, value in zip(("train/loss", "train/accuracy"), row, strict=True)
    ]
    with mlflow.start_run() as run:
        for first in range(0, len(points), 1000):  # MLflow's maximum per call
            mlflow.MlflowClient().log_batch(run.info.run_id, metrics=points[first : first + 1000])


main()
