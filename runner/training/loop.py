"""The training loop: takes steps, asks after them whether to stop or save, evaluates at epochs' ends. No files, no YAML.

Called by fit.py. How a step is taken: step/choose.py. Where the training stands is in `progress`; the loop keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Protocol, TypeVar

from runner.training.progress import Progress
from runner.training.signals import StoppedError
from runner.training.stopping import Limits, StopCondition

T = TypeVar("T")


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
    asked: StopCondition,
    gives_up: Callable[[Mapping[str, float]], bool] | None = None,
) -> Generator[None, None, str]:
    """Trains until a limit, and returns which: finished, patience, max_seconds, pruned, or stopped (by a signal).

    It gives way before each word of `epochs`: there trainings that take their steps together wait for each other
    (stacked/fit.py). One that is alone is gone on with at once (result_of).

    progress: where it stands; a training that is taken up again goes on from there, in the middle of an epoch too.
    evaluate: called at each epoch's end, or every so many steps if `limits` say so, and at the end of all; measures, reports
        and returns the values, {} without a validation split; it waits for the device. A StoppedError of it ends the
        training before the epoch counts as done.
    asked: whether somebody wants an end or a checkpoint.
    keep: writes the state as "last" or "best", or "measured": it was measured. Nothing else here waits for the device.
    gives_up: asked with the measured values, the pruner of a search (None: there is none).
    """

    def measure(*, ends_epoch: bool) -> str | None:
        """Returns why the training ends now, None if it goes on."""
        try:
            values = evaluate()
        except StoppedError:
            return "stopped"
        progress.epoch, progress.measured = progress.epoch + ends_epoch, progress.step
        _judge(values, progress, keep)
        keep("measured")
        if _is_out_of_patience(progress, limits):
            return "patience"
        # asked at the end, too, for the values that later trials are compared with; there it is not given up any more
        if gives_up is not None and gives_up(values) and not _is_over(progress, limits):
            return "pruned"
        return "stopped" if asked(progress.step, at_once=True) is not None else None

    if _is_out_of_patience(progress, limits):  # taken up again after its end
        return "patience"
    first_step = _take_up(progress, epochs.steps_per_epoch, limits)
    while not _is_over(progress, limits):
        steps = epochs.steps(progress.epoch, first_step=first_step)
        while True:
            is_due = limits.is_measured_at(progress.step) and progress.measured != progress.step
            if is_due and (why := measure(ends_epoch=False)) is not None:
                return why
            yield
            if (taken := next(steps, None)) is None:
                break
            progress.step += taken
            if progress.step >= limits.num_steps:
                break
            word = asked(progress.step)
            if word == "save":
                keep("last")
            elif word is not None:
                return word
        first_step = 0
        is_last = progress.step >= limits.num_steps or progress.epoch + 1 >= limits.num_epochs
        if progress.measured == progress.step or not (limits.evaluate_every_steps is None or is_last):
            progress.epoch += 1
        elif (why := measure(ends_epoch=True)) is not None:
            return why
    return "finished"


def result_of(training: Generator[None, None, T]) -> T:
    """What a training that waits for nobody returns."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            result: T = end.value
            return result


def _is_over(progress: Progress, limits: Limits) -> bool:
    all_trained = progress.step >= limits.num_steps or progress.epoch >= limits.num_epochs
    return all_trained and progress.measured == progress.step


def _take_up(progress: Progress, steps_per_epoch: int, limits: Limits) -> int:
    if progress.step >= limits.num_steps:  # there is nothing to train
        return steps_per_epoch
    progress.epoch, steps = divmod(progress.step, steps_per_epoch)
    if progress.step and steps == 0 and progress.measured != progress.step:
        progress.epoch, steps = progress.epoch - 1, steps_per_epoch
    return steps


def _is_out_of_patience(progress: Progress, limits: Limits) -> bool:
    return limits.patience is not None and progress.epochs_without_best >= limits.patience


def _judge(values: Mapping[str, float], progress: Progress, keep: Callable[[str], None]) -> None:
    best = progress.best
    if best.metric not in values:
        return
    progress.epochs_without_best += 1
    if best.improves(values[best.metric]):
        best.value, best.step = values[best.metric], progress.step
        progress.epochs_without_best = 0
        keep("best")
