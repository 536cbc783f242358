"""The training loop: takes steps; between them it saves, evaluates and decides whether to continue. No files, no YAML.

`train` is the loop of one run (fit.py). Jobs that are trained together use a Loop each (stacked/fit.py).
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from runner.device.backends import backward_in_this_thread
from runner.distributed.group import Ranks
from runner.errors import Problem, RunnerError, nearest
from runner.training.signals import Stop, StoppedError

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
    reached: str = ""  # the condition of train.stop_when, or the hook, that ends the training

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
    ways = [f"{KEY}={hit}" for hit in nearest(metric, judged) or judged or ["val/loss"]]
    return Problem.suggest(f"{KEY}={metric}", problem, ways, code="unknown-option")


#: of train.stop_when
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def first_reached(conditions: Mapping[str, str], values: Mapping[str, float]) -> str:
    """Return the first condition that holds, as `val/loss <1e-3`, or an empty text.

    Raises:
        RunnerError: For a metric without a value.
    """
    for metric, condition in conditions.items():
        if metric not in values:
            names = [name for name in values if name.startswith(("train/", "val/"))]
            fix = f"use {' or '.join(f'`{name}`' for name in nearest(metric, names) or names[:3])}"
            problem = f"`{metric}` is not measured; measured are {', '.join(names)}"
            raise RunnerError.of(f"train.stop_when={{{metric}: {condition}}}", problem, fix, code="unknown-option")
        limit = condition.lstrip("<>=")
        if COMPARISONS[condition.removesuffix(limit)](values[metric], float(limit)):
            return f"{metric} {condition}"
    return ""


#: seconds until all processes know an answer
SECONDS_BETWEEN = 0.4
MOST_STEPS_BETWEEN = 5_000
#: of several answers the last one in this list counts
ANSWERS = (None, "save", "max_seconds", "stopped")


@dataclass(frozen=True)
class Limits:
    """When a training ends, whichever comes first."""

    num_epochs: int
    num_steps: int
    max_seconds: float | None = None
    patience: int | None = None  # evaluations without a better value; None: no early stopping
    stop_when: Mapping[str, str] = field(default_factory=dict)  # comparisons by metric, as "<1e-3"
    save_every_seconds: float | None = None
    save_every_steps: int | None = None
    evaluate_every_steps: int | None = None  # None: after each epoch

    def room(self, step: int) -> int:
        """The number of steps after `step` until one of these numbers is reached."""
        every = [number for number in (self.save_every_steps, self.evaluate_every_steps) if number]
        return min([self.num_steps - step, *(number - step % number for number in every)])

    def evaluates_at(self, step: int) -> bool:
        """Whether the validation split is evaluated after `step`, wherever in an epoch that is."""
        return self.evaluate_every_steps is not None and step % self.evaluate_every_steps == 0


#: called with each step: "stopped" and "max_seconds" end the training, "save" saves a checkpoint, None continues. With
#: at_once=True, after an evaluation, the answer is "stopped" or None, and the others come after the next step
StopCondition = Callable[..., str | None]


class OwnStopCondition:
    """The answers of one process."""

    def __init__(self, stop: Stop, limits: Limits) -> None:
        self._stop, self._limits = stop, limits
        self._started = self._saved = time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        if self._stop.signal is not None:
            return "stopped"
        if at_once:
            return None
        now, limits = time.monotonic(), self._limits
        if limits.max_seconds is not None and now - self._started >= limits.max_seconds:
            return "max_seconds"
        by_steps = limits.save_every_steps is not None and step % limits.save_every_steps == 0
        if by_steps or (limits.save_every_seconds is not None and now - self._saved >= limits.save_every_seconds):
            self._saved = now
            return "save"
        return None


class CommonStopCondition:
    """The answers of several processes, which exchange theirs about twice a second.

    The number of steps between two exchanges depends on numbers that all processes have, so all exchange at the same
    steps. Rank 0's clock decides for all.
    """

    def __init__(self, stop: Stop, limits: Limits, ranks: Ranks) -> None:
        own = replace(limits, save_every_steps=None)  # each process counts the steps
        if not ranks.is_first:
            own = replace(own, save_every_seconds=None, max_seconds=None)
        self._own, self._ranks, self._save_every_steps = OwnStopCondition(stop, own), ranks, limits.save_every_steps
        self._pending: str | None = None  # this process's answer, which the others don't know yet
        self._next: int | None = None  # the step of the next exchange
        self._step, self._since = 0, time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        self._pending = max(self._pending, self._own(step, at_once=at_once), key=ANSWERS.index)
        if not at_once and self._next is not None and step < self._next:
            return self._by_steps(step)
        seconds = (time.monotonic() - self._since) / max(1, step - self._step)
        number, seconds = self._ranks.all_reduce_max([float(ANSWERS.index(self._pending)), seconds])
        num_steps = min(int(SECONDS_BETWEEN / max(seconds, 1e-9)), 2 * max(1, step - self._step))
        self._next = step + max(1, min(num_steps, MOST_STEPS_BETWEEN))
        self._step, self._since = step, time.monotonic()
        answer = ANSWERS[int(number)]
        if at_once and answer != "stopped":
            return None  # given after the next step
        self._pending = None
        return answer or self._by_steps(step)

    def _by_steps(self, step: int) -> str | None:
        every = self._save_every_steps
        return "save" if every is not None and step % every == 0 else None


class Epochs(Protocol):
    """The steps to take, epoch by epoch."""

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        """Take an epoch's steps, starting with `first_step`; yields after one or several steps how many they were."""
        ...


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
    def step_in_epoch(self) -> int:
        return self.progress.step - self.progress.epoch * self.steps_per_epoch

    @property
    def is_epoch_over(self) -> bool:
        return self.step_in_epoch >= self.steps_per_epoch or self.progress.step >= self.limits.num_steps

    def begin(self) -> str | None:
        """Find the epoch to continue, and make up for an evaluation that a stop prevented."""
        if self._is_out_of_patience():  # resumed after its end
            return "patience"
        if self.progress.reached:
            return self.progress.reached
        progress, steps_per_epoch = self.progress, self.steps_per_epoch
        if progress.step < self.limits.num_steps:
            progress.epoch = progress.step // steps_per_epoch
            if progress.step and progress.step % steps_per_epoch == 0 and progress.measured != progress.step:
                progress.epoch -= 1
        if self._is_over():
            return "finished"
        reason = self._evaluate_if_due()
        return self.end_of_epoch() if reason is None and self.is_epoch_over else reason

    def after_steps(self, num: int) -> str | None:
        progress = self.progress
        progress.step += num
        if progress.step >= self.limits.num_steps:
            return None
        answer = self._stop(progress.step)
        if answer == "save":
            self._save("last")
        elif answer is not None:
            return answer
        return self._evaluate_if_due()

    def end_of_epoch(self) -> str | None:
        progress, limits = self.progress, self.limits
        is_last = progress.step >= limits.num_steps or progress.epoch + 1 >= limits.num_epochs
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
        all_trained = progress.step >= limits.num_steps or progress.epoch >= limits.num_epochs
        return all_trained and progress.measured == progress.step

    def _is_out_of_patience(self) -> bool:
        patience = self.limits.patience
        return patience is not None and self.progress.epochs_without_best >= patience


def train(steps: Epochs, loop: Loop, *, begin_epoch: Callable[[], None] = lambda: None) -> str:
    """Take steps until there is a reason to end; returns the reason."""
    progress, reason = loop.progress, loop.begin()
    with backward_in_this_thread():
        while reason is None:
            if loop.step_in_epoch == 0:
                begin_epoch()
            for num in steps.epoch(progress.epoch, first_step=loop.step_in_epoch):
                reason = loop.after_steps(num)
                if reason is not None or progress.step >= loop.limits.num_steps:
                    break
            if reason is None:
                reason = loop.end_of_epoch()
    return reason
