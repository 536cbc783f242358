"""The training loop: takes steps; between them it saves, evaluates and decides whether to continue. No files, no YAML.

fit.py calls `train` with the Loop of a run, and stacked/fit.py with a group, each member of which has a Loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from runner.device.backends import backward_in_this_thread
from runner.training.signals import StoppedError
from runner.training.stopping import Limits, StopCondition


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
    seconds: float = 0.0  # of training before this process resumed it
    reached: str = ""  # the condition of train.stop_when, or the hook, that ends the training
    rollbacks: int = 0  # see fit.Training.roll_back()

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


class Epochs(Protocol):
    """The steps to take, epoch by epoch."""

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        """Take an epoch's steps, starting with `first_step`; yields after one or several steps how many they were."""
        ...


class Decisions(Protocol):
    """What happens between the steps: of a Loop, or of a group of them. Each method returns why the training ends, or None."""

    @property
    def leader(self) -> Loop:
        """The Loop itself, or one of a group, as all are at the same step."""
        ...

    def begin(self) -> str | None: ...

    def after_steps(self, num: int) -> str | None: ...

    def end_of_epoch(self) -> str | None: ...


class Loop:
    """Decides what happens between the steps of a training. `progress` is all its state, so it resumes anywhere.

    Each method returns why the training ends now (finished, patience, max_seconds, pruned, stopped by a signal, or
    Progress.reached), or None if it continues. Only evaluate() waits for the device.

    Args:
        evaluate: Evaluates the validation split and returns its values, {} without one. A StoppedError in it ends the
            training before the epoch counts as done.
        save: Saves the state as "last", "best", or "measured" (after each evaluation).
        stop: Called after steps and evaluations.
        is_pruned: Whether a search ends this trial, given an evaluation's values.
    """

    def __init__(
        self,
        progress: Progress,
        limits: Limits,
        steps_per_epoch: int,
        *,
        evaluate: Callable[[], Mapping[str, float]],
        save: Callable[[str], None],
        stop: StopCondition,
        is_pruned: Callable[[Mapping[str, float]], bool] = lambda values: False,
    ) -> None:
        self.progress, self.limits, self.steps_per_epoch = progress, limits, steps_per_epoch
        self._evaluate, self._save, self._stop, self._is_pruned = evaluate, save, stop, is_pruned

    @property
    def leader(self) -> Loop:
        return self

    @property
    def step_in_epoch(self) -> int:
        return self.progress.step - self.progress.epoch * self.steps_per_epoch

    @property
    def has_all_steps(self) -> bool:
        return self.progress.step >= self.limits.num_steps

    def begin(self) -> str | None:
        """Find the epoch to continue, and make up for an evaluation that a stop prevented."""
        if self._is_out_of_patience():  # resumed after its end
            return "patience"
        if self.progress.reached:
            return self.progress.reached
        progress, steps_per_epoch = self.progress, self.steps_per_epoch
        if not self.has_all_steps:
            progress.epoch = progress.step // steps_per_epoch
            if progress.step and progress.step % steps_per_epoch == 0 and progress.measured != progress.step:
                progress.epoch -= 1
        if self._is_over():
            return "finished"
        reason = self._evaluate_if_due()
        is_epoch_over = self.has_all_steps or self.step_in_epoch >= steps_per_epoch
        return self.end_of_epoch() if reason is None and is_epoch_over else reason

    def after_steps(self, num: int) -> str | None:
        progress = self.progress
        progress.step += num
        if self.has_all_steps:
            return None
        answer = self._stop(progress.step)
        if answer == "save":
            self._save("last")
        elif answer is not None:
            return answer
        return self._evaluate_if_due()

    def end_of_epoch(self) -> str | None:
        progress, limits = self.progress, self.limits
        is_last = self.has_all_steps or progress.epoch + 1 >= limits.num_epochs
        if progress.measured == progress.step or not (limits.evaluate_every_steps is None or is_last):
            progress.epoch += 1
        elif (reason := self._measure(ends_epoch=True)) is not None:
            return reason
        return "finished" if self._is_over() else None

    def _evaluate_if_due(self) -> str | None:
        step = self.progress.step
        is_due = self.limits.evaluates_at(step) and self.progress.measured != step
        return self._measure(ends_epoch=False) if is_due else None

    def _measure(self, *, ends_epoch: bool) -> str | None:
        progress = self.progress
        try:
            values = self._evaluate()
        except StoppedError:
            return "stopped"
        progress.epoch, progress.measured = progress.epoch + ends_epoch, progress.step
        if progress.update_best(values):
            self._save("best")
        self._save("measured")
        if self._is_out_of_patience():
            return "patience"
        if progress.reached and not self._is_over():
            return progress.reached
        # called at the end, too: later trials are compared with these values
        if self._is_pruned(values) and not self._is_over():
            return "pruned"
        return "stopped" if self._stop(progress.step, at_once=True) is not None else None

    def _is_over(self) -> bool:
        progress, limits = self.progress, self.limits
        all_trained = self.has_all_steps or progress.epoch >= limits.num_epochs
        return all_trained and progress.measured == progress.step

    def _is_out_of_patience(self) -> bool:
        patience = self.limits.patience
        return patience is not None and self.progress.epochs_without_best >= patience


def train(steps: Epochs, loop: Decisions, *, begin_epoch: Callable[[], None] = lambda: None) -> str:
    """Take steps until there is a reason to end; returns the reason."""
    reason = loop.begin()
    with backward_in_this_thread():
        while reason is None:
            number, first_step = loop.leader.progress.epoch, loop.leader.step_in_epoch
            if first_step == 0:
                begin_epoch()
            for num in steps.epoch(number, first_step=first_step):
                reason = loop.after_steps(num)
                if reason is not None or loop.leader.has_all_steps:
                    break
            if reason is None:
                reason = loop.end_of_epoch()
    return reason
