"""Resume a run from a checkpoint before a step, and train it, bitwise identical, until that step is next.

The training is fit.Training, in a temporary directory without a tracker; a Lens replaces its guard.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from runner.config.settings import Settings
from runner.distributed.group import Alone
from runner.errors import RunnerError
from runner.experiment.build import prepare
from runner.inspection.findings import Finding
from runner.tools.explain.not_finite import NotFiniteObserver, NotFiniteOperation, is_finite
from runner.training import checkpoint
from runner.training.fit import Training
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.signals import Stop
from runner.training.step.train_step import Step

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The checkpoint that a replay begins with."""

    file: Path | None  # None: the start of the run
    step: int = 0


class Reached(Exception):
    """Ends a replay: the requested step is next, or, without `take`, an earlier step made the weights non-finite."""

    def __init__(self, step: int, take: Step | None = None, batches: Sequence[Any] = ()) -> None:
        super().__init__()
        self.step, self.take, self.batches = step, take, batches


@dataclass(frozen=True)
class Moment:
    """A training, stopped right before a step, or after one that made the weights non-finite."""

    parts: Parts
    reached: Reached
    losses: Mapping[int, float]  # of the replayed steps
    task: NoticedTask
    accumulate_steps: int

    @property
    def place(self) -> tuple[int, int]:
        """The epoch of the step, from 0, and the index of its first batch in the epoch."""
        size = self.accumulate_steps
        epoch, step = divmod(self.reached.step - 1, -(-self.parts.train.num_batches // size))
        return epoch, step * size


def start_before(folder: Path, step: int) -> Start:
    """Return the last readable checkpoint of the run before a step."""
    there = folder / "checkpoints"
    kept = {file: int(file.stem.partition("-")[2]) for file in there.glob("step-*.pt")}
    found = [Start(file, number) for file, number in kept.items() if number < step]
    last = there / "last.pt"
    for file in (last, checkpoint.before(last)):
        try:
            number = int(checkpoint.load(file)["step"])
        except (RunnerError, KeyError, TypeError, ValueError):
            continue
        if number < step:
            found.append(Start(file, number))
    return max(found, key=lambda one: one.step, default=Start(None))


def replay(cfg: DictConfig, device: torch.device, start: Start, *, until: int) -> Moment | None:
    """Train until `until` is the next step, or a step makes the weights non-finite; return None if the training ended.

    Steps are eager. Waits for the device after each step, to check the loss and the weights.
    """
    with untracked(cfg, device, start) as training:
        task, losses = NoticedTask(training.parts.task), dict[int, float]()
        training.parts = replace(training.parts, task=task)
        try:
            training.guard = Lens(training.parts, until, step=training.progress.step, losses=losses)
            training.train()
        except Reached as reached:
            # its frames hold the data loader, whose processes would be waited for, 5 s each
            reached.__traceback__ = None
            return Moment(training.parts, reached, losses, task, training.settings.train.accumulate_steps)
    return None


class Lens:
    """Replaces the guard: counts the steps, stores their losses, and ends the training with Reached."""

    def __init__(self, parts: Parts, until: int, *, step: int, losses: dict[int, float]) -> None:
        """step: the last one taken. Raises: Reached if the checkpoint's weights are not finite."""
        self.findings: list[Finding] = []
        self._until, self._step, self._losses = until, step, losses
        weights = [*parts.model.parameters(), *parts.model.buffers()]
        self._weights = [weight for weight in weights if is_finite(weight)]  # a buffer may be a mask of -inf
        if step and not all_finite([*parts.model.parameters()]):
            raise Reached(step)

    def on(self, call: Callable[..., T], *, of_groups: bool = False) -> Callable[..., T]:
        """See inspection.guard.Watching; evaluations are not watched."""
        if not of_groups:
            return call

        def take(batches: Sequence[Any]) -> T:
            self._step += 1
            if self._step == self._until:
                raise Reached(self._step, call, batches)  # type: ignore[arg-type]
            values: Any = call(batches)
            self._losses[self._step] = loss = float(next(iter(values.values())))
            if not math.isfinite(loss) or not all_finite(self._weights):
                raise Reached(self._step)
            return values  # type: ignore[no-any-return]

        return take


@torch.no_grad()
def all_finite(weights: Sequence[Tensor]) -> bool:
    """Check all weights with one read per device."""
    found: dict[torch.device, list[Tensor]] = {}
    for weight in weights:
        found.setdefault(weight.device, []).append(weight.isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in found.values())


def _as_written(settings: Settings) -> Settings:
    train = replace(
        settings.train, compile=False, cuda_graph=False, keep_checkpoints=None, profile=None, clocked_steps=None
    )
    return replace(settings, train=train, placement=replace(settings.placement, guard="off"))


@contextmanager
def untracked(cfg: DictConfig, device: torch.device, start: Start = Start(None)) -> Iterator[Training]:
    """Prepare an eager training in a temporary directory, without a tracker and without a time limit."""
    with tempfile.TemporaryDirectory(prefix="runner-replay-") as folder:
        if start.file is not None:
            _lay(start.file, Path(folder, "checkpoints"))
        cfg = copy.deepcopy(cfg)  # prepare() adds the facts of the data
        settings = _as_written(Settings.of(cfg))
        parts = prepare(cfg, device, is_resumed=start.file is not None)
        endless = replace(parts.limits, max_seconds=None, save_every_seconds=None, save_every_steps=None)
        parts, place = replace(parts, limits=endless), Path(folder)
        training = Training(parts, settings, place, observer=Observer(), stop=Stop(), ranks=Alone())
        try:
            yield training
        finally:
            training.background.close()
            for batches in parts.loaders:
                batches.close()


def _lay(file: Path, folder: Path) -> None:
    folder.mkdir()
    try:
        (folder / "last.pt").symlink_to(file.absolute())
    except OSError:  # a file system without symbolic links
        shutil.copyfile(file, folder / "last.pt")


class LossNotFiniteError(Exception):
    """Ends a watched step before its backward pass, so that the weights stay what they were."""

    def __init__(self, cause: NotFiniteOperation, value: float) -> None:
        super().__init__()
        self.cause, self.value = cause, value


class NoticedTask:
    """A run's task. While `observer` is set, it keeps the batches and raises at a loss that is not finite."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.observer: NotFiniteObserver | None = None
        self.batches: list[Any] = []

    def __call__(self, model: Any, batch: Any, **turn: Any) -> Any:
        """Raises: LossNotFiniteError, in a watched step."""
        observer = self.observer
        if observer is None:
            return self.task(model, batch, **turn)
        self.batches.append(batch)
        observer.in_task = True
        try:
            values = self.task(model, batch, **turn)
        finally:
            observer.in_task = False
        loss = next(iter(values.values()))
        if (cause := observer.cause_of(loss)) is not None:
            raise LossNotFiniteError(cause, float(loss.detach()))
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)
