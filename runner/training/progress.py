"""Where a training stands: its steps, its epochs, and the best value so far. Plain numbers, which a checkpoint carries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from runner.errors import Problem, nearest

KEY = "train.early_stopping.metric"


@dataclass
class Best:
    """The best value so far and the step it was reached at."""

    metric: str
    mode: str  # min | max
    value: float | None = None  # None: nothing measured yet
    step: int = 0

    def improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.value is None or (value < self.value if self.mode == "min" else value > self.value)


@dataclass
class Progress:
    """Where a training stands; what a resumed run goes on from."""

    best: Best
    step: int = 0
    epoch: int = 0  # epochs done: trained and measured
    measured: int = 0  # the step that was measured last
    rate: float | None = None  # the learning rate that was noted last
    epochs_without_best: int = 0
    num_pieces: int = 1  # that each batch is learnt in (step/split_batch.py)
    num_together: int = 0  # members that compute together, of runs that are trained as one (stacked/size.py)
    seconds: float = 0.0  # of training before this process took it up


def missing_metric(metric: str, measured: Iterable[str]) -> Problem:
    """A metric that is not among those of the validation split."""
    names = list(measured)
    problem = f"the validation split has no {metric}; it has {', '.join(names)}"
    judged = [name for name in names if name.startswith("val/")]  # of hooks others may be among them
    return Problem(f"{KEY}={metric}", problem, what_to_write(nearest(metric, judged) or judged), code="unknown-option")


def what_to_write(hits: list[str]) -> str:
    """The setting with each of the nearest names, three at most."""
    return " or ".join(f"{KEY}={hit}" for hit in [*dict.fromkeys(hits or ["val/loss"])][:3])
