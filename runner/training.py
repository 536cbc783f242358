"""Built parts go in; they are trained, tested and reported, and the record of it comes out, however it ends."""

from __future__ import annotations

import errno
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runner import backends
from runner.background import Background
from runner.checkpoint import Keeper
from runner.errors import Fault, RunnerError
from runner.loop import Progress, train
from runner.metrics import MetricBuffer, NotFiniteError, Window
from runner.out_of_memory import Pieces, explain
from runner.parts import Parts
from runner.record import Record
from runner.screen import Screen
from runner.step import evaluate, make_step
from runner.stop import Stop, StoppedError
from runner.tracking.journal import Journal
from runner.tracking.publisher import Publisher
from runner.watch.finding import merged
from runner.watch.guard import Guard
from runner.watch.meetings import PlacementError

log = logging.getLogger("runner")

#: what of a checkpoint are counts
NUMBERS = ("step", "epoch", "measured", "epochs_without_best", "num_pieces")


class Trial(Protocol):
    """A search's view of a run that trains."""

    metric: str

    def gives_up(self, value: float, epoch: int) -> bool:
        """Takes the metric's value at an epoch's end; True when it is not worth going on."""
        ...


class Reporter:
    """Sends what was measured to the journal, the publisher, the screen and the record.

    A run that is taken up again measures some steps anew: what the journal has of them is not written twice.
    """

    def __init__(
        self, record: Record, *, journal: Journal, publisher: Publisher | None, screen: Screen, batch_rows: int
    ) -> None:
        self._record, self._journal, self._publisher, self._screen = record, journal, publisher, screen
        self._batch_rows = batch_rows
        self._sums: dict[str, float] = {}
        self._num_rows = 0
        self._turn = threading.Lock()

    def window(self, window: Window) -> None:
        """Runs in the background thread: the disk may take its time."""
        new = window.steps > self._record.journaled.get(window.names[0], 0)
        if new.any():
            self._journal.points(window.names, window.steps[new], window.times_ms[new], window.values[new])
        steps_per_second = window.num_steps / max(window.seconds, 1e-9)
        last_step, now_ms = int(window.steps[-1]), int(window.times_ms[-1])
        speed = {
            "speed/steps_per_second": steps_per_second,
            "speed/samples_per_second": steps_per_second * self._batch_rows,
        }
        self._points(speed, last_step, now_ms)
        for name, noted in window.notes.items():
            points = [(step, value) for step, value in noted if self._is_new(name, step)]
            if not points:
                continue
            steps, values = np.array([step for step, _ in points]), np.array([[value] for _, value in points])
            self._journal.points((name,), steps, np.full(len(points), now_ms), values)
            self._record.metrics[name] = points[-1][1]
        self._record.metrics |= dict(zip(window.names, map(float, window.values[-1]), strict=True)) | speed
        self._count(int(new.sum()) * len(window.names))
        for name, total in zip(window.names, window.values.sum(0, dtype=np.float64), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + float(total)
        self._num_rows += len(window.values)
        if self._publisher is not None:
            self._publisher.wake()
        self._screen.window(window)

    def values(self, values: Mapping[str, float], *, step: int) -> None:
        """The values of a whole split, at `step`."""
        self._record.metrics |= values
        self._count(self._points(values, step, int(time.time() * 1000)))

    def means(self) -> dict[str, float]:
        """The means over the training's points since the last call."""
        means = {name: total / self._num_rows for name, total in self._sums.items()}
        self._sums, self._num_rows = {}, 0
        return means

    def _points(self, values: Mapping[str, float], step: int, time_ms: int) -> int:
        new = {name: value for name, value in values.items() if self._is_new(name, step)}
        if new:
            self._journal.points(tuple(new), np.array([step]), np.array([time_ms]), np.array([list(new.values())]))
        return len(new)

    def _count(self, num_points: int) -> None:
        with self._turn:  # windows are counted by the background thread, a split's values by the training's
            self._record.points += num_points

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._record.journaled.get(name, 0)


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
    on_oom: str,
    trial: Trial | None = None,
) -> None:
    """Trains, tests with the best weights, and fills `record`. Raises nothing: a failure is a status, with its points kept.

    A folder with a checkpoint is gone on with: the same steps, to the bit, as if it had never stopped.
    """
    background = Background()
    keeper = Keeper(folder / "checkpoints", background)
    buffer = MetricBuffer(parts.device, reporter.window, background=background, pull_every=pull_every, every=every)
    progress = Progress(best=parts.best)
    try:
        _take_up(parts, progress, keeper, buffer)
    except BaseException:
        background.close()
        raise
    for note in keeper.notes:
        screen.say(f"checkpoint: {note}")
    pieces = None
    if on_oom == "split":
        pieces = Pieces(
            parts.device, model=parts.model, optimizer=parts.optimizer, say=screen.say, num=progress.num_pieces
        )
    watch = Guard(parts.device, when=guard, model=parts.model, task=parts.task, optimizer=parts.optimizer)
    tasks = {split: watch.on(parts.task) for split in ("val", "test")}
    step = make_step(
        parts.model,
        parts.task,
        optimizer=parts.optimizer,
        precision=parts.precision,
        clip_grad_norm=clip_grad_norm,
        average=parts.average,
        around=pieces.around if pieces else None,
    )

    def measure(split: str) -> Mapping[str, float]:
        loader = getattr(parts, split)
        if loader is None:
            return {}
        began, generators = time.perf_counter(), backends.generator_states(parts.device)
        try:
            batches = stop.while_not_asked(loader.epoch(0))
            found = evaluate(parts.kept_model, tasks[split], batches, precision=parts.precision)
        except StoppedError:  # it is measured from its beginning when the run goes on
            backends.set_generator_states(generators, parts.device)
            raise
        values = {f"{split}/{name}": value for name, value in found.items()}
        reporter.values(values, step=progress.step)
        record.seconds["evaluate"] += time.perf_counter() - began
        return values

    def end_epoch() -> Mapping[str, float]:
        values = measure("val")
        screen.epoch(progress.epoch + 1, progress.step, values)
        return values

    def gives_up(values: Mapping[str, float]) -> bool:
        if trial is None:
            return False
        if trial.metric.startswith("train/"):
            buffer.pull()
            background.wait()
        known = {**reporter.means(), **values}
        return trial.metric in known and trial.gives_up(known[trial.metric], progress.epoch)

    def keep(name: str) -> None:
        if name == "best":
            keeper.keep(name, _best_state(parts, progress))
            return
        seconds = progress.seconds + time.perf_counter() - began - record.seconds["evaluate"]
        progress.num_pieces = pieces.num if pieces else 1
        keeper.keep(name, _whole_state(parts, progress, buffer) | {"seconds": seconds})

    began = time.perf_counter()
    try:
        parts.model.train()
        with screen.training(num_steps=parts.limits.num_steps, num_epochs=parts.limits.num_epochs):
            record.ending = train(
                watch.on(step, of_groups=True),
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
                gives_up=gives_up,
            )
            buffer.pull(is_end=record.ending != "stopped")
            background.wait()
        record.seconds["train"] = progress.seconds + time.perf_counter() - began - record.seconds["evaluate"]
        keep("last")
        if record.ending == "stopped":
            record.status = "killed"
        else:
            _use_best(parts, progress, keeper, keep)
            measure("test")
            record.status = "pruned" if record.ending == "pruned" else "finished"
    except StoppedError:  # in the test
        record.status = "killed"
    except BaseException as error:
        fail(record, error)
        if backends.is_out_of_memory(error):
            record.ending = "out_of_memory"
            record.error = explain(error, parts, may_split=pieces is None)
    if not record.seconds["train"]:
        record.seconds["train"] = progress.seconds + time.perf_counter() - began - record.seconds["evaluate"]
    _finish(buffer, background, record)
    record.pulls = buffer.pulls
    record.findings = merged(watch.findings)
    _count(record, parts, progress, accumulate_steps)


def _take_up(parts: Parts, progress: Progress, keeper: Keeper, buffer: MetricBuffer) -> None:
    """Puts everything where the folder's last checkpoint says; without one, nothing."""
    state = keeper.last()
    if state is None:
        return
    try:
        _put_back(state, parts, progress, keeper, buffer)
    except Exception as error:  # a checkpoint may come from elsewhere, and hold anything
        so = f"it is not of this model and optimizer, or no run wrote it: {type(error).__name__}: {_first_line(error)}"
        write = "the run in a new folder, or the checkpoint that its own run wrote"
        raise RunnerError(Fault("the folder's checkpoint", so, write)) from error


def _put_back(state: dict[str, Any], parts: Parts, progress: Progress, keeper: Keeper, buffer: MetricBuffer) -> None:
    if not all(type(state[key]) is int and state[key] >= 0 for key in NUMBERS):
        raise ValueError("its steps and epochs are no numbers")
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    for part, key in ((parts.schedule, "schedule"), (parts.precision.scaler, "scaler")):
        if part is not None:
            part.load_state_dict(state[key])
    if parts.average is not None:
        parts.average.model.load_state_dict(state["average"])
    buffer.step = progress.step = state["step"]
    buffer.load_state(state["rows"])
    progress.epoch, progress.measured = state["epoch"], state["measured"]
    progress.epochs_without_best, progress.num_pieces = state["epochs_without_best"], state["num_pieces"]
    progress.rate, progress.seconds = state["rate"], state["seconds"]
    best = keeper.newest.get("best")
    if best is not None and state["best"]["value"] is not None:  # of a torn file the one before it, which is less good
        best = best if best["step"] < state["best"]["step"] else state["best"]
        progress.best.value, progress.best.step = best["value"], best["step"]
    backends.set_generator_states(state["generators"], parts.device)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _use_best(parts: Parts, progress: Progress, keeper: Keeper, keep: Any) -> None:
    """Puts the best weights back for the test; without a validation split the last ones are the best there are."""
    if progress.best.value is None:
        progress.best.step = progress.step
        keep("best")
    parts.kept_model.load_state_dict(keeper.newest["best"]["model"])


def fail(record: Record, error: BaseException) -> None:
    """Makes an error the record's. Raises: what is not an Exception."""
    if isinstance(error, KeyboardInterrupt):
        record.status, record.error = "killed", "interrupted"
        return
    record.status = "failed"
    if isinstance(error, NotFiniteError):
        record.error = f"{error}; try a smaller optimizer.lr, train.clip_grad_norm=1, or look at the data of that step"
        return
    if isinstance(error, PlacementError):
        record.error = str(error)
        log.error("tensors on two devices met", exc_info=error)
        return
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        record.ending = "disk_full"
        record.error = f"the disk is full ({error}); what was saved before is there: make room and resume"
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
    ends: tuple[Callable[[], None], ...] = (
        lambda: buffer.pull(is_end=record.ending != "stopped"),
        background.close,
    )
    for end in ends:
        try:
            end()
        except Exception as error:
            if record.error is None:
                fail(record, error)


def _best_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    best = progress.best
    return {"model": parts.kept_model.state_dict(), "step": best.step, "metric": best.metric, "value": best.value}


def _whole_state(parts: Parts, progress: Progress, buffer: MetricBuffer) -> dict[str, Any]:
    """Everything that a run goes on from."""
    best = progress.best
    return {
        "format": 3,
        "step": progress.step,
        "epoch": progress.epoch,
        "measured": progress.measured,
        "rate": progress.rate,
        "rows": buffer.state(),
        "num_pieces": progress.num_pieces,
        "epochs_without_best": progress.epochs_without_best,
        "best": {"metric": best.metric, "mode": best.mode, "value": best.value, "step": best.step},
        "model": parts.model.state_dict(),
        "average": parts.average.model.state_dict() if parts.average else None,
        "optimizer": parts.optimizer.state_dict(),
        "schedule": parts.schedule.state_dict() if parts.schedule else None,
        "scaler": parts.precision.scaler.state_dict() if parts.precision.scaler else None,
        "generators": backends.generator_states(parts.device),
    }


def _count(record: Record, parts: Parts, progress: Progress, accumulate_steps: int) -> None:
    record.num_steps, record.num_epochs, record.best = progress.step, progress.epoch, progress.best
    steps_per_epoch = -(-parts.train.num_batches // accumulate_steps)
    whole, rest = divmod(progress.step, steps_per_epoch)
    record.num_samples = whole * parts.train.num_rows + rest * parts.train.batch_size * accumulate_steps
