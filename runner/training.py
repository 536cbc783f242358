"""Built parts go in; they are trained, tested and reported, and the record of it comes out, however it ends."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.background import Background
from runner.checkpoint import Keeper
from runner.host_reads import HostRead
from runner.loop import Progress, train
from runner.metrics import MetricBuffer, NotFiniteError, Window
from runner.parts import Parts
from runner.record import Record
from runner.screen import Screen
from runner.step import evaluate, make_step, watched
from runner.stop import Stop
from runner.tracking.journal import Journal
from runner.tracking.publisher import Publisher

log = logging.getLogger("runner")


class Reporter:
    """Sends what was measured to the journal, the publisher, the screen and the record."""

    def __init__(
        self, record: Record, *, journal: Journal, publisher: Publisher | None, screen: Screen, batch_rows: int
    ) -> None:
        self._record, self._journal, self._publisher, self._screen = record, journal, publisher, screen
        self._batch_rows = batch_rows

    def window(self, window: Window) -> None:
        """Runs in the background thread: the disk may take its time."""
        self._journal.points(window.names, window.steps, window.times_ms, window.values)
        steps_per_second = window.num_steps / max(window.seconds, 1e-9)
        last_step, now_ms = int(window.steps[-1]), int(window.times_ms[-1])
        speed = {
            "speed/steps_per_second": steps_per_second,
            "speed/samples_per_second": steps_per_second * self._batch_rows,
        }
        self._points(speed, last_step, now_ms)
        for name, points in window.notes.items():
            steps, values = np.array([step for step, _ in points]), np.array([[value] for _, value in points])
            self._journal.points((name,), steps, np.full(len(points), now_ms), values)
            self._record.metrics[name] = points[-1][1]
        self._record.metrics |= dict(zip(window.names, map(float, window.values[-1]), strict=True)) | speed
        self._record.points += window.values.size
        if self._publisher is not None:
            self._publisher.wake()
        self._screen.window(window)

    def values(self, values: Mapping[str, float], *, step: int) -> None:
        """The values of a whole split, at `step`."""
        self._points(values, step, int(time.time() * 1000))
        self._record.metrics |= values
        self._record.points += len(values)

    def _points(self, values: Mapping[str, float], step: int, time_ms: int) -> None:
        self._journal.points(tuple(values), np.array([step]), np.array([time_ms]), np.array([list(values.values())]))


def train_and_test(
    parts: Parts,
    record: Record,
    *,
    reporter: Reporter,
    screen: Screen,
    stop: Stop,
    folder: Path,
    accumulate_steps: int,
    clip_grad_norm: float | None,
    pull_every: int,
    every: int,
    guard: str,
) -> None:
    """Trains, tests with the best weights, and fills `record`. Raises nothing: a failure is a status, with its points kept."""
    background = Background()
    keeper = Keeper(folder / "checkpoints", background)
    buffer = MetricBuffer(parts.device, reporter.window, background=background, pull_every=pull_every, every=every)
    progress = Progress(best=parts.best)
    reads: list[HostRead] = []
    step = make_step(
        parts.model,
        parts.task,
        optimizer=parts.optimizer,
        precision=parts.precision,
        clip_grad_norm=clip_grad_norm,
        average=parts.average,
    )

    def measure(split: str) -> Mapping[str, float]:
        batches = getattr(parts, split)
        if batches is None:
            return {}
        began = time.perf_counter()
        found = evaluate(parts.kept_model, parts.task, batches, precision=parts.precision)
        values = {f"{split}/{name}": value for name, value in found.items()}
        reporter.values(values, step=progress.step)
        record.seconds["evaluate"] += time.perf_counter() - began
        return values

    def end_epoch() -> Mapping[str, float]:
        values = measure("val")
        screen.epoch(progress.epoch, progress.step, values)
        return values

    def keep(name: str) -> None:
        state = _best_state(parts, progress) if name == "best" else _whole_state(parts, progress)
        keeper.keep(name, state)

    began = time.perf_counter()
    try:
        parts.model.train()
        with screen.training(num_steps=parts.limits.num_steps, num_epochs=parts.limits.num_epochs):
            record.ending = train(
                watched(step, device=parts.device, guard=guard, found=reads),
                parts.train,
                optimizer=parts.optimizer,
                schedule=parts.schedule,
                buffer=buffer,
                progress=progress,
                limits=parts.limits,
                accumulate_steps=accumulate_steps,
                evaluate=end_epoch,
                keep=keep,
                stop=stop,
            )
            buffer.pull()
            background.wait()
        record.seconds["train"] = time.perf_counter() - began - record.seconds["evaluate"]
        keep("last")
        if record.ending == "stopped":
            record.status = "killed"
        else:
            _use_best(parts, progress, keeper, keep)
            measure("test")
            record.status = "finished"
    except BaseException as error:
        _fail(record, error)
    record.seconds["train"] = record.seconds["train"] or time.perf_counter() - began - record.seconds["evaluate"]
    _finish(buffer, background, record)
    record.pulls = buffer.pulls
    record.unexpected = [str(read) for read in reads]
    _count(record, parts, progress, accumulate_steps)


def _use_best(parts: Parts, progress: Progress, keeper: Keeper, keep: Any) -> None:
    """Puts the best weights back for the test; without a validation split the last ones are the best there are."""
    if progress.best.value is None:
        progress.best.step = progress.step
        keep("best")
    parts.kept_model.load_state_dict(keeper.newest["best"]["model"])


def _fail(record: Record, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        record.status, record.error = "killed", "interrupted"
        return
    record.status = "failed"
    if isinstance(error, NotFiniteError):
        record.error = f"{error}; try a smaller optimizer.lr, train.clip_grad_norm=1, or look at the data of that step"
        return
    where = traceback.extract_tb(error.__traceback__)[-1]
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(Path.cwd())
    ]
    where = own[-1] if own else where
    record.error = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    log.error("the run failed", exc_info=error)
    if not isinstance(error, Exception):
        raise error  # SystemExit and the like are not ours to keep


def _finish(buffer: MetricBuffer, background: Background, record: Record) -> None:
    """Brings the last rows over, also after a failure, and ends the thread."""
    for end in (buffer.pull, background.close):
        try:
            end()
        except Exception as error:
            if record.error is None:
                _fail(record, error)


def _best_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    best = progress.best
    return {"model": parts.kept_model.state_dict(), "step": best.step, "metric": best.metric, "value": best.value}


def _whole_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Everything that a run would go on from."""
    best = progress.best
    return {
        "format": 1,
        "step": progress.step,
        "epoch": progress.epoch,
        "epochs_without_best": progress.epochs_without_best,
        "best": {"metric": best.metric, "mode": best.mode, "value": best.value, "step": best.step},
        "model": parts.model.state_dict(),
        "average": parts.average.model.state_dict() if parts.average else None,
        "optimizer": parts.optimizer.state_dict(),
        "schedule": parts.schedule.state_dict() if parts.schedule else None,
        "scaler": parts.precision.scaler.state_dict() if parts.precision.scaler else None,
        "cpu_generator": torch.get_rng_state(),
    }


def _count(record: Record, parts: Parts, progress: Progress, accumulate_steps: int) -> None:
    record.num_steps, record.num_epochs, record.best = progress.step, progress.epoch, progress.best
    steps_per_epoch = -(-parts.train.num_batches // accumulate_steps)
    whole, rest = divmod(progress.step, steps_per_epoch)
    record.num_samples = whole * parts.train.num_rows + rest * parts.train.batch_size * accumulate_steps
