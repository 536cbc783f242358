"""Built parts go in; they are trained, tested and reported, and the record of it comes out, however it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from torch.utils.data import Dataset

from runner.config.identity import chosen
from runner.data.loading.loaders import Batches
from runner.data.loading.shard import Shard, Sharded
from runner.device import backends
from runner.device.backends import overruns
from runner.distributed import messages
from runner.distributed.gradients import Together, TogetherInParts
from runner.distributed.group import Ranks, is_lost
from runner.errors import RunnerError
from runner.experiment.best_metric import missing
from runner.experiment.build import Parts
from runner.experiment.console import Screen
from runner.experiment.reporter import Reporter, Unheard
from runner.experiment.run_record import Record
from runner.inspection.findings import merged
from runner.inspection.guard import Guard
from runner.training.background import Background
from runner.training.checkpoint import Keeper
from runner.training.failure import fail
from runner.training.loop import Asked, AskedAlone, Epochs, Progress, train
from runner.training.metric_buffer import MetricBuffer
from runner.training.signals import Stop, StoppedError
from runner.training.state import best_state, put_back_best, take_up, whole_state
from runner.training.step.compiled import make_compiled
from runner.training.step.cuda_graphs import Graphed, cuda_graphs
from runner.training.step.eager import Rates, StepByStep
from runner.training.step.split_batch import Pieces, explain
from runner.training.step.train_step import Step, evaluate, make_judge, make_step
from runner.training.stopping import AskedTogether

#: batches an epoch, below which the last, smaller one is worth being compiled by itself: else it is under a twentieth
FEW_BATCHES = 20


class Trial(Protocol):
    """A search's view of a run that trains."""

    metric: str

    def gives_up(self, value: float, epoch: int) -> bool:
        """Takes the metric's value at an epoch's end; True when it is not worth going on."""
        ...


class Training:
    """What a training reports, measures and keeps while it lasts."""

    def __init__(
        self,
        cfg: DictConfig,
        parts: Parts,
        record: Record,
        *,
        reporter: Reporter | Unheard,
        screen: Screen,
        stop: Stop,
        folder: Path,
        trial: Trial | None,
        ranks: Ranks,
    ) -> None:
        """Takes up what the folder's checkpoints hold. Starts the background thread, which finish() ends.

        ranks: the processes that train together; all of them make the same calls.
        Raises: RunnerError for a checkpoint that can't be gone on with.
        """
        self.cfg, self.parts, self.record, self.stop = cfg, parts, record, stop
        self._reporter, self.screen, self._trial = reporter, screen, trial
        self.background = Background(reporter.settle)
        self.ranks, self.folder = ranks, folder
        self.keeper = Keeper(folder / "checkpoints", self.background, writes=ranks.is_first)
        self.buffer = MetricBuffer(
            parts.device,
            reporter.window,
            background=self.background,
            pull_every=cfg.metrics.pull_every,
            every=cfg.metrics.every,
            mean=ranks.mean if ranks.num > 1 else None,
        )
        self.progress = Progress(best=parts.best)
        self._experiment = chosen(cfg)
        try:
            take_up(parts, self.progress, self.keeper, self.buffer, ranks, experiment=self._experiment)
        except BaseException:
            self.background.close()
            raise
        for note in self.keeper.notes:
            screen.say(f"checkpoint: {note}")
        self.pieces: Pieces | None = None
        guard = cfg.placement.guard
        if cfg.train.compile and self.progress.step:
            guard = "off"  # it would have the step run as it is written, and with other bits than the undisturbed run's
        self.watch = Guard(parts.device, when=guard, model=parts.model, task=parts.task, optimizer=parts.optimizer)
        judge = make_judge(parts.task, precision=parts.precision)
        if parts.shards is not None:
            judge = parts.shards.within(judge)
        self._judges = {split: self.watch.on(judge) for split in ("val", "test")}
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of training, so far, without what was spent measuring splits."""
        return self.progress.seconds + time.perf_counter() - self._began - self.record.seconds["evaluate"]

    def measure(self, split: str) -> Mapping[str, float]:
        """The values of a whole split, reported; {} where there is none. Raises: StoppedError in its middle."""
        loader, parts = getattr(self.parts, split), self.parts
        if loader is None:
            return {}
        began, generators = time.perf_counter(), backends.generator_states(parts.device)
        try:
            shared = self._share_evaluation()
            found = evaluate(
                parts.kept_model,
                parts.task,
                self._while_not_asked(loader.epoch(0, shard=shared) if shared else loader.epoch(0)),
                precision=parts.precision,
                judge=self._judges[split],
                labels=parts.source.classes or parts.source.targets,
                total=self.ranks.total if shared else None,
            )
        except StoppedError:  # it is measured from its beginning when the run goes on
            backends.set_generator_states(generators, parts.device)
            raise
        finally:
            if parts.shards is not None:
                parts.shards.let_go()
        values = {f"{split}/{name}": value for name, value in found.items()}
        now = int(time.time() * 1000)
        self.background.do(partial(self._reporter.values, values, step=self.progress.step, time_ms=now))
        if split == "val" and parts.best.metric not in values:
            fault = missing(parts.best.metric, values)
            if parts.limits.patience is not None or parts.falls_by_metric:  # it would never stop early, or fall
                raise RunnerError(fault)
            if self.progress.epoch == 0:
                self.screen.say(f"best: the last weights are kept, as {fault.so}; write {fault.write}")
        self.record.seconds["evaluate"] += time.perf_counter() - began
        return values

    def _share_evaluation(self) -> Shard | None:
        """Which rows of a split this process measures; None for all of them.

        Metrics over a whole split are measured by each process: nobody can tell how theirs would be put together.
        """
        if self.ranks.num == 1:
            return None
        models = [self.parts.model, self.parts.kept_model]
        self.ranks.alike([buffer for model in models for buffer in model.buffers()])  # each has seen rows of its own
        return None if getattr(self.parts.task, "metrics", None) else Shard(self.ranks.rank, self.ranks.num)

    def _while_not_asked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Stop.while_not_asked(), such that all processes leave, or none."""
        if self.ranks.num == 1:
            yield from self.stop.while_not_asked(batches)
            return
        for batch in batches:
            if self._is_stopping(together=self.parts.shards is not None):  # parts come together for each batch
                break
            yield batch
        if self._is_stopping(together=True):
            raise StoppedError

    def _is_stopping(self, *, together: bool) -> bool:
        """Whether this process was asked to end; together: whether any was."""
        is_asked = self.stop.signal is not None
        return bool(self.ranks.highest([float(is_asked)])[0]) if together else is_asked

    def together(self) -> Together | TogetherInParts | None:
        """What several processes take a step with; None for one alone."""
        if self.ranks.num == 1:
            return None
        if self.parts.shards is not None:
            return TogetherInParts(self.parts.shards, self.parts.task, num=self.ranks.num)
        return Together(
            self.parts.model,
            self.parts.task,
            num=self.ranks.num,
            unused_parameters=self.cfg.placement.unused_parameters,
        )

    def asked(self) -> Asked:
        """What is asked after each step."""
        limits = self.parts.limits
        return AskedAlone(self.stop, limits) if self.ranks.num == 1 else AskedTogether(self.stop, limits, self.ranks)

    def failed(self, error: BaseException) -> None:
        """Makes an error the record's; where several processes train, the first error of any of them."""
        fail(self.record, error)
        if self.ranks.num > 1:
            text = messages.LOST if is_lost(error) else self.record.error
            messages.tell(self.folder, self.ranks.rank, text or "interrupted")
            words = messages.first_words(self.folder)
            self.record.error = words.text if words is not None else self.record.error

    def end_epoch(self) -> Mapping[str, float]:
        """Measures the validation split and tells of it."""
        values = self.measure("val")
        if self.parts.falls_by_metric and values:
            self.parts.schedule.step(values[self.parts.best.metric])  # type: ignore[union-attr,arg-type]
        self.screen.epoch(self.progress.epoch + 1, self.progress.step, values)
        return values

    def gives_up(self, values: Mapping[str, float]) -> bool:
        """Whether the search's pruner sees no sense in going on."""
        if self._trial is None:
            return False
        if self._trial.metric.startswith("train/"):
            self.buffer.pull()
            self.background.wait()
        known = {**self._reporter.means(), **values}
        metric = self._trial.metric
        return metric in known and self._trial.gives_up(known[metric], self.progress.epoch)

    def keep(self, name: str) -> None:
        """Takes a checkpoint, "best" or "last"; it is written in the background."""
        if name == "best":
            self.keeper.keep(name, best_state(self.parts, self.progress))
            return
        self.progress.num_pieces = self.pieces.num if self.pieces else 1
        state = whole_state(self.parts, self.progress, self.buffer, self.ranks)
        if self.ranks.is_first:
            self.keeper.keep(name, state | {"seconds": self.seconds, "experiment": self._experiment})

    def use_best(self) -> None:
        """Puts the best weights back for the test; without a validation split the last ones are the best there are."""
        progress = self.progress
        if progress.best.value is None:
            progress.best.step = progress.step
            self.keep("best")
        put_back_best(self.parts, self.keeper.newest["best"])

    def finish(self) -> None:
        """Brings the last rows over, also after a failure, ends the thread, and fills the record."""
        record, progress = self.record, self.progress
        if not record.seconds["train"]:
            record.seconds["train"] = self.seconds
        ends: tuple[Callable[[], None], ...] = (
            lambda: self.buffer.pull(is_end=record.ending != "stopped"),
            self.background.close,
        )
        is_left_alone = self.ranks.num > 1 and record.status == "failed"  # the others may be gone
        for end in ends[is_left_alone:]:
            try:
                end()
            except Exception as error:
                if record.error is None:
                    fail(record, error)
        record.pulls, record.findings = self.buffer.pulls, merged(self.watch.findings)
        record.num_steps, record.num_epochs, record.best = progress.step, progress.epoch, progress.best


def train_and_test(training: Training) -> None:
    """Trains, tests with the best weights, and fills the record. Raises nothing: a failure is a status, with its points kept.

    A folder with a checkpoint is gone on with: the same steps, to the bit, as if it had never stopped.
    """
    parts, record = training.parts, training.record
    try:
        _train(training)
        if record.ending == "stopped":
            record.status = "killed"
        else:
            training.use_best()
            training.measure("test")
            record.status = "pruned" if record.ending == "pruned" else "finished"
    except StoppedError:  # in the test
        record.status = "killed"
    except BaseException as error:
        training.failed(error)
        if backends.is_out_of_memory(error):
            record.ending = "out_of_memory"
            record.error = explain(error, parts, may_split=training.pieces is None)
    training.finish()
    for batches in (parts.train, parts.val, parts.test):
        if batches is not None:
            batches.close()
    accumulate_steps = training.cfg.train.accumulate_steps
    steps_per_epoch = -(-parts.train.num_batches // accumulate_steps)
    whole, rest = divmod(record.num_steps, steps_per_epoch)
    record.num_samples = whole * parts.train.num_rows + rest * parts.train.batch_size * accumulate_steps


def _usual_rows(batches: Batches) -> int | None:
    """Of all batches but a smaller last one, where it is one of many; None where all are to be compiled."""
    is_rare = batches.num_rows % batches.batch_size != 0 and batches.num_batches >= FEW_BATCHES
    return batches.batch_size if is_rare else None


def _epochs(training: Training, make: Callable[..., Step], step: Step, batches: Batches) -> Epochs:
    """The epochs' steps, one call each or as graphs of the device."""
    parts, buffer, progress = training.parts, training.buffer, training.progress
    accumulate_steps = training.cfg.train.accumulate_steps
    of_steps = None if parts.falls_by_metric else parts.schedule
    rates = Rates(parts.optimizer, of_steps, buffer=buffer, progress=progress)
    if not training.cfg.train.cuda_graph:
        return StepByStep(step, batches, accumulate_steps=accumulate_steps, rates=rates, buffer=buffer)
    capture, warm = cuda_graphs()
    return Graphed(
        make,
        batches.indexed(),
        first=step,
        num_rows=batches.num_rows,
        batch_size=batches.batch_size,
        accumulate_steps=accumulate_steps,
        optimizer=parts.optimizer,
        rates=rates,
        buffer=buffer,
        progress=progress,
        limits=parts.limits,
        capture=capture,
        warm=warm,
        device=parts.device,
    )


def _train(training: Training) -> None:
    """To the end, whichever comes first, and its last checkpoint."""
    cfg, parts, record, screen = training.cfg, training.parts, training.record, training.screen
    if cfg.train.on_oom == "split":
        num_pieces = training.progress.num_pieces
        training.pieces = Pieces(
            parts.device, model=parts.model, optimizer=parts.optimizer, say=screen.say, num=num_pieces
        )
    together = training.together()
    make = partial(
        make_step,
        parts.model,
        together.task if together else parts.task,
        optimizer=parts.optimizer,
        precision=parts.precision,
        clip_grad_norm=cfg.train.clip_grad_norm,
        average=parts.average,
        around=training.pieces.around if training.pieces else None,
        parted=together.parted if together else None,
    )
    step = make()
    if cfg.train.compile:
        step = make_compiled(
            make,
            optimizer=parts.optimizer,
            is_first=training.progress.step == 0,
            fixed_shapes=not isinstance(parts.splits.train, Dataset),
            usual_rows=None if together else _usual_rows(parts.train),
            in_part="processes exchange gradients in the middle of the step" if together else "",
            keeps_layout=parts.device.type == "cpu" and bool(overruns(parts.model)),
            say=screen.say,
        )
    batches = Sharded(parts.train, Shard(training.ranks.rank, training.ranks.num)) if together else parts.train
    parts.model.train()
    with screen.training(num_steps=parts.limits.num_steps, num_epochs=parts.limits.num_epochs):
        record.ending = train(
            _epochs(training, make, training.watch.on(step, of_groups=True), batches),
            progress=training.progress,
            limits=parts.limits,
            evaluate=training.end_epoch,
            keep=training.keep,
            asked=training.asked(),
            gives_up=training.gives_up,
        )
        training.buffer.pull(is_end=record.ending != "stopped")
        training.background.wait()
    record.seconds["train"] = training.seconds
    training.keep("last")
