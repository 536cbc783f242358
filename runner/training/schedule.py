"""Learning rates over a training: the built-in schedules, and the only place that advances a schedule and notes its rates."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from runner.training.loop import Progress
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import Turns


class Schedule:
    """Advances learning rates after each optimizer step, each epoch, each evaluation, or never.

    Args:
        scheduler: None: constant rates.
        metric: The name of the value that a scheduler such as ReduceLROnPlateau follows.
        every: Optimizer steps from one advance to the next: 1, or the steps of an epoch.
        words: When it advances, for the run's lines.

    Attributes:
        step: The optimizer steps so far.
        last_step: It stays as it is after this step.
    """

    def __init__(
        self, scheduler: LRScheduler | None = None, *, metric: str = "", every: int = 1, words: str = ""
    ) -> None:
        self.scheduler, self.every, self.words, self._metric = scheduler, every, words, metric
        self.step, self.last_step = 0, math.inf
        self.follows_metric = scheduler is not None and wants_metric(scheduler)
        self.follows_steps = scheduler is not None and not self.follows_metric

    def after_step(self) -> None:
        """Count an optimizer step, however many batches it accumulated, and advance if it is due."""
        self.step += 1
        is_due = self.step % self.every == 0 and self.step <= self.last_step
        if self.scheduler is not None and self.follows_steps and is_due:
            self.scheduler.step()

    def after_evaluation(self, values: Mapping[str, float]) -> None:
        """Advance by an evaluation of the validation split."""
        if self.scheduler is not None and self.follows_metric:
            self.scheduler.step(values[self._metric])  # type: ignore[arg-type]

    def catch_up(self, num_steps: int) -> None:
        """Advance a new scheduler by the steps that a run has taken; the state of one of another length doesn't fit it."""
        with warnings.catch_warnings():
            # the optimizer has taken its steps before
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(num_steps):
                self.after_step()

    def scale(self, factor: float) -> None:
        """Multiply all rates that are still to come."""
        for each in (self.scheduler, *getattr(self.scheduler, "_schedulers", ())):
            for name in ("base_lrs", "max_lrs"):
                if hasattr(each, name):
                    setattr(each, name, [rate * factor for rate in getattr(each, name)])

    def state_dict(self) -> dict[str, Any] | None:
        return self.scheduler.state_dict() if self.scheduler is not None else None

    def load_state_dict(self, state: Any, *, step: int) -> None:
        self.step = step
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)


def wants_metric(scheduler: Any) -> bool:
    """Whether a scheduler's step() takes a metric (ReduceLROnPlateau)."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


class Rates:
    """An optimizer's learning rates, step by step. The first group's rate is noted where it changes, as train/lr.

    With several optimizers the first rate of each is noted, too, as train/lr_NAME.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, *, buffer: MetricBuffer, progress: Progress) -> None:
        self.optimizer, self.buffer, self.progress = optimizer, buffer, progress
        self.are_scheduled = schedule.follows_steps  # whether a step may have other rates than the one before it
        self._schedule = schedule
        self._groups = optimizer.param_groups
        turns = optimizer.each if isinstance(optimizer, Turns) else {}
        self._of_turns = {f"train/lr_{name}": one.param_groups[0] for name, one in turns.items()}

    def advance(self) -> None:
        self._schedule.after_step()

    def note(self, *, ahead: int = 0) -> None:
        """Note the rates of the next step, or of one `ahead` steps after it, before it is taken."""
        rate = self._groups[0]["lr"]
        if rate != self.progress.rate:
            self.progress.rate = float(rate)
            self.buffer.note("train/lr", self.progress.rate, ahead=ahead)
            for name, group in self._of_turns.items():
                self.buffer.note(name, float(group["lr"]), ahead=ahead)


def warmup_cosine(
    optimizer: Optimizer, *, num_steps: int, warmup_fraction: float = 0.1, final_fraction: float = 0.0
) -> LRScheduler:
    """Linear warm-up over the first part of `num_steps`, then half a cosine down to `final_fraction` of the rate.

    Raises:
        ValueError: For an argument out of its range.
    """
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps is a whole number, 1 or more, and not {num_steps!r}")
    if not 0 <= warmup_fraction <= 1:
        raise ValueError(f"warmup_fraction is a part of all steps, from 0 to 1, and not {warmup_fraction}")
    if not 0 <= final_fraction < math.inf:
        raise ValueError(f"final_fraction is a part of the rate, 0 or more, and not {final_fraction}")
    warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
