"""The same work for every peer: digits repeated to 60,000 rows, MLP 64-128-10, batch 128, Adam, loss and accuracy each step."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

NUM_ROWS, HIDDEN, BATCH_SIZE, LEARNING_RATE, SEED = 60_000, 128, 128, 1e-3, 0


@dataclass(frozen=True)
class Work:
    epochs: int
    threads: int
    store: str  # an sqlite file of this measurement's own
    most_steps: int | None  # a peer that is too slow for whole epochs stops here
    variant: str


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """(60000, 64) float32 in 0..1 and (60000,) int64."""
    digits = load_digits()
    rows = np.arange(NUM_ROWS) % len(digits.target)
    return (digits.data / 16).astype(np.float32)[rows], digits.target.astype(np.int64)[rows]


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def arguments() -> Work:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", required=True)
    parser.add_argument("--most-steps", type=int)
    parser.add_argument("--variant", default="")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return Work(given.epochs, given.threads, given.store, given.most_steps, given.variant)


def tell(*, num_steps: int, seconds: float, points: int, loss: float) -> None:
    """One JSON line, the last thing that a peer prints."""
    print(json.dumps({"num_steps": num_steps, "seconds": seconds, "points": points, "loss": loss, "at": time.time()}))
