"""Trains a run's parts, tests them with their best weights, and returns what came of it, however it ends.

Called by experiment/run.py, and by experiment/other_ranks.py in the processes beside the first. Training keeps what lives
as long as one: progress, metric buffer, checkpoints, background thread; stacked/fit.py has several of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from runner.config.settings import Settings
from runner.device.backends import is_out_of_memory, peak_memory, use_in_thread
from runner.distributed import messages
from runner.distributed.group import Ranks, is_lost
from runner.errors import RunnerError
from runner.inspection.findings import merged
from runner.inspection.guard import Guard, Watching
from runner.training.background import Background
from runner.training.evaluate import Evaluation
from runner.training.failure import fail
from runner.training.hooks import Hooks
from runner.training.loop import Epochs, result_of, train
from runner.training.metric_buffer import MetricBuffer, Rows, check_unread
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.profile import Profiled
from runner.training.progress import missing_metric
from runner.training.result import Result
from runner.training.signals import Stop, StoppedError
from runner.training.state import Checkpoints
from runner.training.step.choose import Watchers, choose_steps
from runner.training.step.clock import StepClock
from runner.training.step.split_batch import explain
from runner.training.stopping import CommonStopCondition, OwnStopCondition, StopCondition


class Place(Rows, Epochs, Protocol):
    """One training's place among several that take their steps together: it has its rows and its steps of them.

    step_seconds: that the steps have taken, of all of them. clock: of these steps (None: there is none).
    """

    asked: StopCondition
    step_seconds: float
    clock: StepClock | None


def fit(parts: Parts, settings: Settings, folder: Path, *, observer: Observer, stop: Stop, ranks: Ranks) -> Result:
    """Trains, and tests with the best weights. A folder with a checkpoint is gone on with: the same steps, to the bit.

    folder: the run's. ranks: the processes that train together; all of them make the same calls.
    A training that fails raises nothing: that is a status, with its points kept.
    Raises: RunnerError for a checkpoint that can't be gone on with.
    """
    return result_of(Training(parts, settings, folder, observer=observer, stop=stop, ranks=ranks).run())


class Training:
    """What lives as long as a training: where it stands, its metric buffer, checkpoints, guard and background thread."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        folder: Path,
        *,
        observer: Observer,
        stop: Stop,
        ranks: Ranks,
        place: Place | None = None,
    ) -> None:
        """Starts the background thread, which finish() ends. place: among trainings that take their steps together."""
        self.parts, self.settings, self.folder = parts, settings, folder
        self.observer, self.stop, self.ranks = observer, stop, ranks
        self.result = Result(best=parts.best, num_processes=ranks.num)
        self.values: Mapping[str, float] = {}  # that were measured last
        self.profiled: Profiled | None = None
        self.background = Background(observer.settle, begin=partial(use_in_thread, parts.device))
        self.place = place
        self.buffer: Rows = place or MetricBuffer(
            parts.device,
            observer.window,
            background=self.background,
            pull_every=settings.metrics.pull_every,
            every=settings.metrics.every,
            mean=ranks.mean if ranks.num > 1 else None,
        )
        try:
            experiment = settings.experiment
            keep = settings.train.keep_checkpoints
            self.checkpoints = Checkpoints(
                parts, folder, self.background, ranks=ranks, experiment=experiment, keep=keep
            )
            self.progress = self.checkpoints.restore(self.buffer)
        except BaseException:
            self.background.close()
            raise
        for note in self.checkpoints.notes:
            observer.say(f"checkpoint: {note}")
        when = settings.placement.guard
        if place is not None or (settings.train.compile and self.progress.step):
            when = "off"  # it would have the step run as it is written, and with other bits than the undisturbed run's
        self.guard: Watching = Guard(
            parts.device,
            when=when,
            model=parts.model,
            task=parts.task,
            optimizer=parts.optimizer,
        )
        self.evaluation = Evaluation(parts, self.guard, stop=stop, ranks=ranks)
        own_hooks = parts.hooks if ranks.is_first else ()
        self.hooks = Hooks(own_hooks, parts, folder, say=observer.say, must_work=settings.train.check)
        self.clock: StepClock | None = None
        self._beside: defaultdict[str, float] = defaultdict(float)  # seconds of what goes on beside the steps
        self._step_seconds, self._first_step = 0.0, self.progress.step
        self._began = time.perf_counter()

    def run(self) -> Generator[None, None, Result]:
        """All of it, see fit(); gives way where trainings that take their steps together wait for each other."""
        parts, result = self.parts, self.result
        try:
            yield from self.train()
            if result.ending == "stopped":
                result.status = "killed"
            else:
                with self.beside("checkpoints"):
                    if self.settings.train.check and self.ranks.num == 1:
                        self.background.wait()
                        self.checkpoints.restore(self.buffer)
                    self.checkpoints.use_best(self.progress)
                with self.beside("test"):
                    self.values = self.measure("test")
                self.call_hooks("end")
                result.status = "pruned" if result.ending == "pruned" else "finished"
        except StoppedError:  # in the test
            result.status = "killed"
        except BaseException as error:
            self.failed(error)
            if is_out_of_memory(error):
                result.ending = "out_of_memory"
                result.error = explain(error, parts, self.settings, num_processes=self.ranks.num)
        self.finish()
        for batches in (parts.train, parts.val, parts.test):
            if batches is not None:
                batches.close()
        return result

    @property
    def seconds(self) -> float:
        """Of training, so far, without what was spent measuring splits and in hooks."""
        aside = self.evaluation.seconds + self.hooks.seconds
        return self.progress.seconds + time.perf_counter() - self._began - aside

    def train(self) -> Generator[None, None, None]:
        """To the end, whichever comes first, and its last checkpoint."""
        parts, limits = self.parts, self.parts.limits
        epochs: Epochs
        asked: StopCondition = OwnStopCondition(self.stop, limits)
        if self.ranks.num > 1:
            asked = CommonStopCondition(self.stop, limits, self.ranks)
        num_clocked = self.settings.train.clocked_steps
        if num_clocked and self.ranks.is_first and self.place is None:
            self.clock = StepClock(num_clocked, first=self.progress.step, limits=limits, device=parts.device)
        if self.place is not None:
            epochs, asked = self.place, self.place.asked
        else:
            assert isinstance(self.buffer, MetricBuffer)
            epochs = choose_steps(
                parts,
                self.settings,
                progress=self.progress,
                buffer=self.buffer,
                ranks=self.ranks,
                watchers=Watchers(self.guard, self.clock, self.observer.say),
            )
        if self.settings.train.profile and self.ranks.is_first:
            epochs = self.profiled = Profiled(
                epochs,
                self.settings.train.profile,
                device=parts.device,
                folder=self.folder,
                say=self.observer.say,
                left=limits.num_steps - self.progress.step,
            )
        parts.model.train()
        if not self.progress.step:
            self.call_hooks("start")
        with self.observer.progress(num_steps=limits.num_steps, num_epochs=limits.num_epochs):
            began, beside = time.perf_counter(), sum(self._beside.values())
            try:
                self.result.ending = yield from train(
                    epochs,
                    progress=self.progress,
                    limits=limits,
                    evaluate=self.validate,
                    keep=self.keep,
                    asked=asked,
                    gives_up=self.gives_up,
                )
            finally:
                self._step_seconds = time.perf_counter() - began - sum(self._beside.values()) + beside
            if self.profiled is not None:
                self.profiled.end()
            with self.beside("disk"):
                self.buffer.pull(is_end=self.result.ending != "stopped")
                self.background.wait()
        self.result.seconds["train"] = self.seconds
        self.keep("last")

    def validate(self) -> Mapping[str, float]:
        """Evaluate the validation split, call the hooks and report the epoch's values. Waits for the device.

        The metric buffer is pulled here, so that the training values next to the validation values are the epoch's own.
        """
        parts = self.parts
        with self.beside("validation"):
            measured = self.values = self.measure("val")
            # the device has been waited for: spoilt weights are not the best, and none of them is kept as measured
            check_unread(self.buffer.state(), step=self.progress.step)
            self.buffer.pull(is_end=False)
        values = self.values = {**measured, **self.call_hooks("epoch")}
        if values and parts.best.metric not in values:
            self._miss(values)
        if values:
            parts.schedule.after_evaluation(values)
        progress, best = self.progress, self.progress.best
        is_best = best.metric in values and best.improves(values[best.metric])
        show = partial(self.observer.epoch, progress.epoch + 1, progress.step, measured, is_best=is_best)
        self.background.do(show)  # after the window
        return values

    def measure(self, split: str) -> Mapping[str, float]:
        """The values of a whole split, told; {} where there is none. Raises: StoppedError in its middle."""
        values = self.evaluation.measure(split)
        now = int(time.time() * 1000)
        if values:
            self.background.do(partial(self.observer.values, values, step=self.progress.step, time_ms=now))
        return values

    def call_hooks(self, when: str) -> Mapping[str, float]:
        """Tells what they return; the numbers, which all processes get."""
        progress, parts = self.progress, self.parts
        steps_per_epoch = -(-parts.train.num_batches // self.settings.train.accumulate_steps)
        is_at_end = progress.step % steps_per_epoch == 0 or progress.step >= parts.limits.num_steps
        epoch = progress.epoch + (when == "epoch" and is_at_end)
        with self.beside("hooks"):
            shown = self.hooks.call(when, epoch=epoch, step=progress.step, values=dict(self.values))
        now = int(time.time() * 1000)
        if shown.numbers:
            self.background.do(partial(self.observer.values, shown.numbers, step=progress.step, time_ms=now))
        if shown.images or shown.tables:
            self.background.do(partial(self.observer.shown, shown, step=progress.step, time_ms=now))
        return self.ranks.broadcast_object(shown.numbers) if parts.hooks else {}

    def _miss(self, values: Mapping[str, float]) -> None:
        problem = missing_metric(self.parts.best.metric, values)
        if (
            self.parts.limits.patience is not None or self.parts.schedule.follows_metric
        ):  # it would never stop early, or fall
            raise RunnerError(problem)
        if not self.progress.measured and self.parts.val is not None:  # without one nobody expects it
            self.observer.say(f"best: the last weights are kept, as {problem.message}; {problem.advice}")

    def keep(self, name: str) -> None:
        """Takes a checkpoint, "best", "last" or "measured"; it is written in the background."""
        if name != "measured" or self.settings.train.keep_checkpoints:
            self.result.times[name] = self.result.times.get(name, 0) + 1
        with self.beside("checkpoints"):
            if name == "best":
                self.checkpoints.keep_best(self.progress)
            elif name == "measured":
                self.checkpoints.keep_measured(self.progress, self.buffer, seconds=self.seconds, measured=self.values)
            else:
                self.checkpoints.keep_last(self.progress, self.buffer, seconds=self.seconds)

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """What goes on within is no part of the steps."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._beside[name] += time.perf_counter() - began

    def gives_up(self, values: Mapping[str, float]) -> bool:
        """Whether the search's pruner sees no sense in going on."""
        trial = self.observer.trial
        if trial is None:
            return False
        if trial.metric.startswith("train/"):
            self.buffer.pull()
            self.background.wait()
        known = {**self.observer.means(), **values}
        every, progress = self.settings.train.evaluate_every_steps, self.progress
        number = progress.epoch if every is None else -(-progress.step // every)
        return trial.metric in known and trial.gives_up(known[trial.metric], number)

    def failed(self, error: BaseException) -> None:
        """Makes an error the result's; where several processes train, the first error of any of them."""
        result = self.result
        fail(result, error)
        if self.ranks.num > 1:
            text = messages.LOST if is_lost(error) else result.error
            messages.tell(self.folder, self.ranks.rank, text or "interrupted")
            words = messages.first_failure(self.folder)
            result.error = words.text if words is not None else result.error

    def finish(self) -> None:
        """Brings the last rows over, also after a failure, ends the thread, and fills the result."""
        result, progress = self.result, self.progress
        result.seconds["evaluate"] = self.evaluation.seconds
        if not result.seconds["train"]:
            result.seconds["train"] = self.seconds
        pull = partial(self.buffer.pull, is_end=result.ending != "stopped")
        is_left_alone = self.ranks.num > 1 and result.status == "failed"  # the others may be gone
        for end in (self.background.close,) if is_left_alone else (pull, self.background.close):
            try:
                with self.beside("disk"):
                    end()
            except Exception as error:
                if result.error is None:
                    fail(result, error)
        self._tell_times()
        result.pulls, result.findings = self.buffer.pulls, merged(self.guard.findings)
        result.peak_memory = peak_memory(self.parts.device)
        result.num_steps, result.num_epochs, result.best = progress.step, progress.epoch, progress.best
        result.num_samples = self._num_samples()

    def _tell_times(self) -> None:
        result, place = self.result, self.place
        clock = self.clock if place is None else place.clock
        seconds = self._step_seconds if place is None else place.step_seconds
        num_steps = self.progress.step - self._first_step
        if clock is None:
            self._beside["steps"] += seconds
        else:
            result.steps = replace(clock.times(seconds, num_steps), is_shared=place is not None)
        result.beside = dict(self._beside)
        result.times["validation"] = self.evaluation.times

    def _num_samples(self) -> int:
        batches, accumulate_steps = self.parts.train, self.settings.train.accumulate_steps
        epochs, steps = divmod(self.progress.step, -(-batches.num_batches // accumulate_steps))
        return epochs * batches.num_rows + steps * batches.batch_size * accumulate_steps
