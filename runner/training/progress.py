"""How far a training is: its steps, its epochs, the best value. Plain numbers, which a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runner.errors import Problem, nearest

KEY = "train.early_stopping.metric"


@dataclass
class Best:
    """The best value of a metric and the step at which it was reached."""

    metric: str
    mode: str  # min | max
    value: float | None = None  # None: not evaluated yet
    step: int = 0

    def improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.value is None or (value < self.value if self.mode == "min" else value > self.value)


@dataclass
class Progress:
    """How far a training is, and where a resumed run continues."""

    best: Best
    step: int = 0
    epoch: int = 0  # trained and evaluated
    measured: int = 0  # the step of the last evaluation
    rate: float | None = None  # the learning rate that was noted last
    epochs_without_best: int = 0
    num_pieces: int = 1  # into which each batch is split (step/split_batch.py)
    num_together: int = 0  # members that compute together, of jobs that are trained together (stacked/size.py)
    seconds: float = 0.0  # of training before this process resumed it

    def update_best(self, values: Mapping[str, float]) -> bool:
        """Count an evaluation for early stopping; returns whether its value is the best so far."""
        best = self.best
        if best.metric not in values:
            return False
        self.epochs_without_best += 1
        if not best.improves(values[best.metric]):
            return False
        best.value, best.step = values[best.metric], self.step
        self.epochs_without_best = 0
        return True


def missing_metric(metric: str, measured: Iterable[str]) -> Problem:
    """A metric that the validation split doesn't have."""
    names = list(measured)
    problem = f"the validation split has no {metric}; it has {', '.join(names)}"
    judged = [name for name in names if name.startswith("val/")]  # hooks add others
    return Problem(f"{KEY}={metric}", problem, what_to_write(nearest(metric, judged) or judged), code="unknown-option")


def what_to_write(hits: list[str]) -> str:
    """The setting with each of the nearest names, at most three."""
    return " or ".join(f"{KEY}={hit}" for hit in [*dict.fromkeys(hits or ["val/loss"])][:3])
