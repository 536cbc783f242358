"""The steps to take go in; a trained model and how the training went come out. No files, no YAML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from runner.training.signals import Stop, StoppedError


@dataclass
class Best:
    """The best value so far and the step it was reached at."""

    metric: str
    mode: str  # min | max
    value: float | None = None  # None: nothing measured yet
    step: int = 0

    def improves(self, value: float) -> bool:
        if math.isnan(value):
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
    num_pieces: int = 1  # that each batch is learnt in (runner.training.step.split_batch)
    seconds: float = 0.0  # of training before this process took it up


@dataclass(frozen=True)
class Limits:
    """When a training ends, whichever comes first."""

    num_epochs: int
    num_steps: int
    max_seconds: float | None = None
    patience: int | None = None  # epochs without a better value; None: no early stopping
    save_every_seconds: float | None = None
    save_every_steps: int | None = None

    def room(self, step: int) -> int:
        """Steps that may be taken at once after `step`, so that none of these numbers is passed by."""
        to_the_end = self.num_steps - step
        return (
            min(to_the_end, self.save_every_steps - step % self.save_every_steps)
            if self.save_every_steps
            else to_the_end
        )


class Asked(Protocol):
    """What is asked after each step: "stopped" and "max_seconds" end the training, "save" wants a checkpoint, None goes on."""

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        """at_once: at an epoch's end; there it is "stopped" or None, and no word waits for a later step."""
        ...


class AskedAlone:
    """The answers of one process; costs a look at the clock."""

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
        if _is_due(limits, step, now - self._saved):
            self._saved = now
            return "save"
        return None


class Epochs(Protocol):
    """The steps to take, epoch by epoch."""

    @property
    def steps_per_epoch(self) -> int: ...

    def steps(self, epoch: int, *, first_step: int = 0) -> Iterator[int]:
        """Takes the epoch's steps from `first_step` on, and gives word after one or several of them: how many they were."""
        ...


def train(
    epochs: Epochs,
    *,
    progress: Progress,
    limits: Limits,
    evaluate: Callable[[], Mapping[str, float]],
    keep: Callable[[str], None],
    asked: Asked,
    gives_up: Callable[[Mapping[str, float]], bool] | None = None,
) -> str:
    """Trains until a limit, and returns which: finished, patience, max_seconds, pruned, or stopped (by a signal).

    progress: where it stands; a training that is taken up again goes on from there, in the middle of an epoch too.
    evaluate: measures, reports and returns the epoch's values, {} without a validation split; it waits for the device.
        A StoppedError of it ends the training before the epoch counts as done.
    asked: whether somebody wants an end or a checkpoint.
    keep: writes the state as "last" or "best". Nothing else here waits for the device.
    gives_up: asked with each epoch's values, the pruner of a search (None: there is none).
    """
    if _is_out_of_patience(progress, limits):  # taken up again after its end
        return "patience"
    first_step = _take_up(progress, epochs.steps_per_epoch, limits)
    while not _is_over(progress, limits):
        for taken in epochs.steps(progress.epoch, first_step=first_step):
            progress.step += taken
            if progress.step >= limits.num_steps:
                break
            word = asked(progress.step)
            if word == "save":
                keep("last")
            elif word is not None:
                return word
        try:
            values = evaluate()
        except StoppedError:
            return "stopped"
        progress.epoch, progress.measured = progress.epoch + 1, progress.step
        first_step = 0
        _judge(values, progress, keep)
        if _is_out_of_patience(progress, limits):
            return "patience"
        # asked at the last epoch, too, for the values that later trials are compared with; there it is not given up any more
        if gives_up is not None and gives_up(values) and not _is_over(progress, limits):
            return "pruned"
        if asked(progress.step, at_once=True) is not None:
            return "stopped"
    return "finished"


def _is_due(limits: Limits, step: int, seconds: float) -> bool:
    by_steps = limits.save_every_steps is not None and step % limits.save_every_steps == 0
    return by_steps or (limits.save_every_seconds is not None and seconds >= limits.save_every_seconds)


def _is_over(progress: Progress, limits: Limits) -> bool:
    """Whether all is trained, and measured too: a run may have been stopped between the two."""
    all_trained = progress.step >= limits.num_steps or progress.epoch >= limits.num_epochs
    return all_trained and progress.measured == progress.step


def _take_up(progress: Progress, steps_per_epoch: int, limits: Limits) -> int:
    """Sets the epoch to go on with and returns its first step. An epoch that `num_steps` broke off may go on, too."""
    if progress.step >= limits.num_steps:  # there is nothing to train
        return steps_per_epoch
    progress.epoch, steps = divmod(progress.step, steps_per_epoch)
    if progress.step and steps == 0 and progress.measured != progress.step:
        progress.epoch, steps = progress.epoch - 1, steps_per_epoch
    return steps


def _is_out_of_patience(progress: Progress, limits: Limits) -> bool:
    return limits.patience is not None and progress.epochs_without_best >= limits.patience


def _judge(values: Mapping[str, float], progress: Progress, keep: Callable[[str], None]) -> None:
    """Keeps the weights when they are the best so far."""
    best = progress.best
    if best.metric not in values:
        return
    progress.epochs_without_best += 1
    if best.improves(values[best.metric]):
        best.value, best.step = values[best.metric], progress.step
        progress.epochs_without_best = 0
        keep("best")
