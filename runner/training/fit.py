"""Trains a run's parts, tests them with the best weights, and returns the result, however the training ends.

experiment/run.py calls `fit`, and so do the other ranks (experiment/processes.py). stacked/fit.py has several Trainings.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from runner.config.settings import Settings
from runner.device.backends import is_out_of_memory, peak_memory, use_in_thread
from runner.device.precision import SkippingScaler
from runner.distributed import messages
from runner.distributed.group import Ranks, is_lost
from runner.errors import RunnerError
from runner.inspection.findings import merged
from runner.inspection.guard import Guard, Watching
from runner.training.background import Background
from runner.training.carried_state import reset_state, unsaved_in_words
from runner.training.checkpoint import CheckpointWriter, Keeping
from runner.training.evaluate import Evaluation
from runner.training.hooks import Hooks
from runner.training.loop import Loop, Progress, train
from runner.training.metric_buffer import MetricBuffer, NotFiniteError, check_unread
from runner.training.observer import EpochEnd, Observer
from runner.training.parts import Parts
from runner.training.profile import Profiled
from runner.training.result import Result, fail
from runner.training.signals import Stop, StoppedError
from runner.training.state import best_state, check_losses, check_weights, full_state, restore, restore_best, roll_back
from runner.training.step.choose import Watchers, choose_steps
from runner.training.step.clock import StepClock
from runner.training.step.split_batch import explain
from runner.training.stopping import CommonStopCondition, OwnStopCondition, StopCondition, first_reached, missing_metric

#: beginnings of Progress.reached
STOP_WHEN, HOOKS = "train.stop_when: ", "train.hooks: "
#: train.on_nonfinite=rollback
MAX_ROLLBACKS, ROLLBACK_FACTOR = 10, 0.5
MIN_SKIPPED = 10  # steps in a row, after which nothing is left to hope for


def fit(parts: Parts, settings: Settings, folder: Path, *, observer: Observer, stop: Stop, ranks: Ranks) -> Result:
    """Train, and test with the best weights. Resumes from the directory's checkpoint, with bitwise identical steps.

    Args:
        folder: The run directory.
        ranks: The processes that train together. All of them make the same calls.

    Returns:
        The result. A training that fails doesn't raise: its result has the error, and its points are kept.

    Raises:
        RunnerError: For a checkpoint that can't be resumed.
    """
    training = Training(parts, settings, folder, observer=observer, stop=stop, ranks=ranks)
    with training.failures():
        training.end(training.train())
    training.close()
    return training.result


class Training:
    """What exists as long as a run trains: its progress, metric buffer, checkpoints, guard and background thread."""

    loop: Loop
    clock: StepClock | None = None  # of the steps; stacked/fit.py sets it for members

    def __init__(
        self, parts: Parts, settings: Settings, folder: Path, *, observer: Observer, stop: Stop, ranks: Ranks
    ) -> None:
        """Start the background thread, which close() ends."""
        self.parts, self.settings, self.folder = parts, settings, folder
        self.observer, self.stop, self.ranks = observer, stop, ranks
        self.result = Result(best=parts.best, num_processes=ranks.num)
        self.steps_per_epoch = -(-parts.train.num_batches // settings.train.accumulate_steps)
        self.values: Mapping[str, float] = {}  # of the last evaluation
        on_nonfinite = settings.train.on_nonfinite
        self._ends_not_finite, self._rolls_back = on_nonfinite != "skip", on_nonfinite == "rollback"
        self.profiled: Profiled | None = None
        self.background = Background(observer.settle, begin=partial(use_in_thread, parts.device))
        self.buffer = MetricBuffer(
            parts.device,
            observer.window,
            background=self.background,
            pull_every=settings.metrics.pull_every,
            every=settings.metrics.every,
            checks=self._ends_not_finite,
            waits=self._rolls_back,
            mean=ranks.mean if ranks.num > 1 else None,
        )
        try:
            best, keep = parts.best, settings.train.keep_checkpoints
            self.checkpoints = CheckpointWriter(
                folder / "checkpoints",
                self.background,
                writes=ranks.is_first,
                device=parts.device,
                keeping=Keeping.of(keep, metric=best.metric, mode=best.mode) if keep else None,
                check=self._check,
            )
            self.progress = self.restore()
        except BaseException:
            self.background.close()
            raise
        self._num_skipped = self._count_skipped()  # until the last evaluation
        reasons = [f"{STOP_WHEN}{' '.join(each)}" for each in parts.limits.stop_when.items()]
        if self.progress.reached not in (*reasons, *(f"{HOOKS}{hook.name}" for hook in parts.hooks)):
            self.progress.reached = ""  # a resumed run has other conditions
        if self.progress.step:
            observer.say(f"resume: continues after step {self.progress.step:,}")
        for note in self.checkpoints.notes:
            observer.say(f"checkpoint: {note}")
        when = settings.placement.guard
        if settings.train.compile and self.progress.step:
            when = "off"  # a watched step is not compiled, and would not be identical to the uninterrupted run's
        self.guard: Watching = Guard(
            parts.device, when=when, model=parts.model, task=parts.task, optimizer=parts.optimizer
        )
        self.evaluation = Evaluation(parts, self.guard, stop=stop, ranks=ranks)
        hooks = parts.hooks if ranks.is_first else ()
        self.hooks = Hooks(hooks, parts, folder, say=observer.say, must_work=settings.train.check)
        self._display = ExitStack()
        self._other_seconds: defaultdict[str, float] = defaultdict(float)
        self._first_step, self._began = self.progress.step, time.perf_counter()
        self._steps_began, self._has_begun = 0.0, False
        self._left_out = 0.0

    def train(self) -> str:
        """Take steps until there is a reason to end; returns the reason."""
        parts, settings, limits, stop, ranks = self.parts, self.settings, self.parts.limits, self.stop, self.ranks
        num_clocked, num_profiled = settings.train.clocked_steps, settings.train.profile
        if num_clocked and ranks.is_first:
            self.clock = StepClock(num_clocked, first=self.progress.step, limits=limits, device=parts.device)
        watchers = Watchers(self.guard, self.clock, self.observer.say)
        steps = choose_steps(
            parts, settings, progress=self.progress, buffer=self.buffer, ranks=ranks, watchers=watchers
        )
        if num_profiled and ranks.is_first:
            left, say = limits.num_steps - self.progress.step, self.observer.say
            steps = self.profiled = Profiled(
                steps, num_profiled, device=parts.device, folder=self.folder, say=say, left=left
            )
        self.begin(OwnStopCondition(stop, limits) if ranks.num == 1 else CommonStopCondition(stop, limits, ranks))
        if self._rolls_back and not self.progress.step:
            self.save("last")
        while True:
            try:
                return train(steps, self.loop, begin_epoch=partial(reset_state, parts.model, parts.task))
            except NotFiniteError as error:
                if not self._rolls_back or self.progress.rollbacks == MAX_ROLLBACKS:
                    raise
                self.roll_back(error)
            steps = choose_steps(
                parts, settings, progress=self.progress, buffer=self.buffer, ranks=ranks, watchers=watchers
            )

    def roll_back(self, error: NotFiniteError) -> None:
        """Return to the weights of the last checkpoint, halve the rates, and continue with the next batches.

        The steps since then stay in the metrics and in the count of steps.
        """
        parts, progress = self.parts, self.progress
        for pull in (self.buffer.pull, self.background.wait):
            with suppress(NotFiniteError):  # of the same weights
                pull()
        self.background.recover()
        state = self.checkpoints.last()
        if state is None:
            raise error
        parts.schedule.catch_up(self.buffer.step - progress.step)
        progress.step, progress.rollbacks = self.buffer.step, progress.rollbacks + 1
        roll_back(state, parts, factor=ROLLBACK_FACTOR)
        weights = f"the weights of step {state['step']:,} are restored, and rates times {ROLLBACK_FACTOR:g}"
        self.observer.say(f"rollback: {error}; {weights} ({progress.rollbacks} of {MAX_ROLLBACKS})")
        count, now = {"train/rollbacks": float(progress.rollbacks)}, int(time.time() * 1000)
        self.background.do(partial(self.observer.values, count, step=progress.step, time_ms=now))
        self.save("last")

    def begin(self, stop: StopCondition) -> None:
        """Make the loop, call the hooks and open the display."""
        limits = self.parts.limits
        self._began = time.perf_counter()
        self.parts.model.train()
        if not self.progress.step:
            self.call_hooks("start")
        self._display.enter_context(self.observer.progress(num_steps=limits.num_steps, num_epochs=limits.num_epochs))
        self._steps_began, self._has_begun = self._step_time(), True
        self.buffer.skip(time.perf_counter() - self.buffer.seen_until)  # the start of the run
        self.loop = Loop(
            self.progress,
            limits,
            self.steps_per_epoch,
            evaluate=self.validate,
            save=self.save,
            stop=stop,
            is_pruned=self.is_pruned,
        )

    def end(self, reason: str) -> None:
        """Save the last checkpoint. Unless a signal stopped the training, also test with the best weights."""
        result = self.result
        result.ending = reason
        with self.timed("disk"):
            if self.profiled is not None:
                self.profiled.end()
            self.buffer.pull(is_end=reason != "stopped")
            self.background.wait()
        self._display.close()
        result.seconds["train"] = self.seconds
        self.save("last")
        if reason == "stopped":
            result.status = "killed"
            return
        with self.timed("checkpoints"):
            if self.settings.train.check and self.ranks.num == 1:
                self.background.wait()
                self.restore()
            restore_best(self.checkpoints, self.parts, self.progress)
        with self.timed("test"):
            self.values = self.measure("test")
        self.call_hooks("end")
        result.status = "pruned" if reason == "pruned" else "finished"

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Make an error in the block the result's. Where several processes train, the first error of any of them."""
        result = self.result
        try:
            yield
        except StoppedError:  # in the test
            result.status = "killed"
        except BaseException as error:
            self._display.close()
            fail(result, error)
            if self.ranks.num > 1:
                text = messages.LOST if is_lost(error) else result.error
                messages.record(self.folder, self.ranks.rank, text or "interrupted")
                first = messages.first_failure(self.folder)
                result.error = first.text if first is not None else result.error
            if is_out_of_memory(error):
                result.ending = "out_of_memory"
                result.error = explain(error, self.parts, self.settings, num_processes=self.ranks.num)

    def close(self) -> None:
        """Copy the last rows to the host, also after a failure; end the thread, fill the result, and close the data."""
        result, progress, batches = self.result, self.progress, self.parts.train
        result.seconds["evaluate"] = self.evaluation.seconds
        result.seconds["train"] = result.seconds["train"] or self.seconds
        pull = partial(self.buffer.pull, is_end=result.ending != "stopped")
        may_be_last = self.ranks.num > 1 and result.status == "failed"  # the other processes may have ended
        for end in (self.background.close,) if may_be_last else (pull, self.background.close):
            try:
                with self.timed("disk"):
                    end()
            except Exception as error:
                if result.error is None:
                    fail(result, error)
        step_seconds = self._step_time() - self._steps_began if self._has_begun else 0.0
        if self.clock is None:
            self._other_seconds["steps"] += step_seconds
        else:
            result.steps = self.clock.times(step_seconds, progress.step - self._first_step)
        result.other_seconds = dict(self._other_seconds)
        result.times["validation"] = self.evaluation.times
        result.pulls, result.findings = self.buffer.pulls, merged(self.guard.findings)
        result.peak_memory = peak_memory(self.parts.device)
        result.num_steps, result.num_epochs, result.best = progress.step, progress.epoch, progress.best
        epochs, steps = divmod(progress.step, self.steps_per_epoch)
        step_size = batches.batch_size * self.settings.train.accumulate_steps
        result.num_samples = epochs * batches.num_rows + steps * step_size
        for split in self.parts.loaders:
            split.close()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without evaluations and hooks."""
        others = self.evaluation.seconds + self.hooks.seconds
        return self.progress.seconds + time.perf_counter() - self._began - others

    def validate(self) -> Mapping[str, float]:
        """Evaluate the validation split, call the hooks and report the epoch's values. Waits for the device.

        The metric buffer is pulled first: the training values next to the validation values are the epoch's own, and the
        window's seconds are of steps only.
        """
        parts = self.parts
        # before anything is evaluated or saved: weights after a loss that is not finite are never the best
        if self._ends_not_finite:
            check_unread(self.buffer.state(), step=self.progress.step)
        else:
            self._check_skipped()
        self.buffer.pull(is_end=False)
        began = time.perf_counter()
        with self.timed("validation"):
            measured = self.values = self.measure("val")
        values = self.values = {**measured, **self.call_hooks("epoch")}
        self.buffer.skip(time.perf_counter() - began)
        if values and parts.best.metric not in values:
            self._report_missing(values)
        if values:
            parts.schedule.after_evaluation(values)
        progress, best = self.progress, self.progress.best
        if parts.limits.stop_when or parts.hooks:
            progress.reached = self.ranks.broadcast_object(self._reached(values) if self.ranks.is_first else "")
        is_best = best.metric in values and best.improves(values[best.metric])
        end = EpochEnd(progress.epoch + 1, progress.step, measured, is_best, progress.reached)
        self.background.do(partial(self.observer.epoch, end))  # after the window
        return values

    def measure(self, split: str) -> Mapping[str, float]:
        """Evaluate a split and report its values; {} if there is no such split. Raises: StoppedError."""
        values = self.evaluation.measure(split)
        now = int(time.time() * 1000)
        if values:
            self.background.do(partial(self.observer.values, values, step=self.progress.step, time_ms=now))
        return values

    def call_hooks(self, when: str) -> Mapping[str, float]:
        """Call the hooks and report what they return; returns their numbers, in all processes."""
        progress, parts = self.progress, self.parts
        is_at_end = progress.step % self.steps_per_epoch == 0 or progress.step >= parts.limits.num_steps
        epoch = progress.epoch + (when == "epoch" and is_at_end)
        with self.timed("hooks"):
            shown = self.hooks.call(when, epoch=epoch, step=progress.step, values=dict(self.values))
        now = int(time.time() * 1000)
        if shown.numbers:
            self.background.do(partial(self.observer.values, shown.numbers, step=progress.step, time_ms=now))
        if shown.images or shown.tables:
            self.background.do(partial(self.observer.shown, shown, step=progress.step, time_ms=now))
        return self.ranks.broadcast_object(shown.numbers) if parts.hooks else {}

    def restore(self) -> Progress:
        """Restore the last checkpoint. Raises: RunnerError, see state.restore()."""
        experiment = self.settings.experiment
        return restore(self.checkpoints, self.parts, self.buffer, ranks=self.ranks, experiment=experiment)

    def save(self, name: str) -> None:
        """Take a checkpoint, which the background thread writes.

        Args:
            name: "best": the weights; "last": the complete state; "measured": the complete state after an evaluation, if
                train.keep_checkpoints keeps any.
        """
        parts, progress, times = self.parts, self.progress, self.result.times
        if name == "measured" and self.checkpoints.keeping is None:
            return
        if not times and (names := parts.carried.unsaved()):
            self.observer.say(f"checkpoint: {unsaved_in_words(names)}")
        times[name] = times.get(name, 0) + 1
        with self.timed("checkpoints"):
            if name == "best":
                self.checkpoints.keep("best", best_state(parts, progress))
                return
            experiment = self.settings.experiment
            state = full_state(parts, progress, self.buffer, self.ranks, seconds=self.seconds, experiment=experiment)
            entry = {"step": progress.step, "epoch": progress.epoch, "metrics": dict(self.values)}
            if self.ranks.is_first:
                self.checkpoints.keep("last", state, entry=entry if name == "measured" else None)
            if self._rolls_back:
                self.background.wait()  # an error is raised at the same step in each run

    def is_pruned(self, values: Mapping[str, float]) -> bool:
        """Whether the search ends this trial."""
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

    def leave_out(self, seconds: float) -> None:
        """Count seconds, in which other members of a group were busy, neither as steps nor in the metric buffer's windows."""
        self._left_out += seconds
        self.buffer.skip(seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the block's time under a name, and not as time of the steps."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._other_seconds[name] += time.perf_counter() - began

    def _reached(self, values: Mapping[str, float]) -> str:
        """Return which hook or condition of train.stop_when ends the training, or an empty text."""
        if self.hooks.stopped_by:
            return f"{HOOKS}{self.hooks.stopped_by}"
        conditions = self.parts.limits.stop_when
        if any(metric.startswith("train/") for metric in conditions):
            self.background.wait()
        condition = first_reached(conditions, {**self.observer.metrics, **values})
        return condition and f"{STOP_WHEN}{condition}"

    def _report_missing(self, values: Mapping[str, float]) -> None:
        problem = missing_metric(self.parts.best.metric, values)
        if self.parts.limits.patience is not None or self.parts.schedule.follows_metric:
            raise RunnerError(problem)  # it would never stop early, or the rate would never fall
        if not self.progress.measured and self.parts.val is not None:
            self.observer.say(f"best: the last weights are kept, as {problem.message}; {problem.help}")

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise for a checkpoint that must not be resumed."""
        if self._rolls_back:
            check_weights(state, dict(self.parts.model.named_parameters()))
        elif self._ends_not_finite:
            check_losses(state)

    def _check_skipped(self) -> None:
        """Raise if all steps since the last evaluation were skipped."""
        num_steps, before = self.progress.step - self.progress.measured, self._num_skipped
        self._num_skipped = self._count_skipped()
        if self._num_skipped - before == num_steps >= MIN_SKIPPED:
            problem = f"the gradients of the last {num_steps:,} steps are not finite, so they trained nothing"
            fix = "find the first wrong operation with `train.on_nonfinite=fail` and `python -m runner explain last`"
            raise RunnerError.of("train.on_nonfinite=skip", problem, fix)

    def _count_skipped(self) -> int:
        scaler = self.parts.precision.scaler
        return scaler.num_skipped() if isinstance(scaler, SkippingScaler) else 0

    def _step_time(self) -> float:
        return time.perf_counter() - sum(self._other_seconds.values()) - self._left_out
