"""Opens what a run needs while it lasts, and closes it however the run ends: screen, journal, uploader, signals.

Lives in the process that tracks, prints and writes: the only one of a run, or rank 0. fit() reports to its `reporter`.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from runner.config import origin
from runner.config.secrets import for_disk, mask_folder
from runner.config.settings import Settings
from runner.config.trust import check_folder
from runner.device import backends
from runner.device.torch_private import optimizers_without_dynamo
from runner.distributed.group import Ranks
from runner.errors import CODE_ERRORS, without_password
from runner.experiment import hints
from runner.experiment import summary as summaries
from runner.experiment.console import Screen, describe_parts, device_row, last_rows
from runner.experiment.context import Checked, RunContext
from runner.experiment.figures import illustrate
from runner.experiment.notify import notify
from runner.experiment.provenance import versions
from runner.experiment.reporter import Reporter, example_rows
from runner.experiment.summary import Summary
from runner.experiment.terminal import row, short
from runner.models.card import write_card
from runner.tracking import recipes
from runner.tracking.ack import Ack
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import Series, read_series
from runner.tracking.mlflow_model import GRAPH
from runner.tracking.model_graph import forget_graph
from runner.tracking.publisher import LOG, Publisher
from runner.tracking.store_uri import shown
from runner.tracking.trackers import chosen_trackers
from runner.training.parts import Parts
from runner.training.profile import FOLDER as TRACES
from runner.training.result import Result, fail
from runner.training.signals import Stop, listening
from runner.version import IMPORTED

MANY_POINTS = 10_000  # a healthy store takes a second for them
MAX_WARNINGS = 3  # of the tracker, on the screen
#: a pruned trial did what it was to do
MLFLOW_STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "killed": "KILLED", "failed": "FAILED"}


class Session:
    """A run's journal, uploader, screen and signals while it lasts. Use Session.open()."""

    # from begin() on
    stop: Stop
    reporter: Reporter
    summary: Summary  # once it is closed
    _parts: Parts
    _result: Result

    def __init__(self, cfg: DictConfig, folder: Path, *, machine: Checked, context: RunContext) -> None:
        self.folder, self.settings = folder, Settings.of(cfg)
        self.screen = context.screen or Screen()
        self._machine, self._context, self._notify_url = machine, context, cfg.notify.url
        saved = OmegaConf.create(for_disk(cfg, without=("sweep", "plan")))  # before the data fills in the facts
        self._rerun = f"defaults: [schema, base, _self_]\n{OmegaConf.to_yaml(saved)}"
        self._publisher: Publisher | None = None
        self._ack: Ack | None = None  # once the uploader has finished
        self._open = ExitStack()  # the journal and the signals
        self._hints: list[str] = []
        self._began = time.perf_counter()
        # the process's age would be wrong: a shell that is replaced by its last command passes its age on
        self._before = self._began - IMPORTED if context.owns_process else 0.0  # seconds
        self._setup = self._waited = 0.0  # seconds, of them waiting for the tracker
        self._trained: float | None = None  # when

    @classmethod
    @contextmanager
    def open(cls, cfg: DictConfig, folder: Path, *, machine: Checked, context: RunContext) -> Iterator[Session]:
        """Start printing and uploading; at the end, print the results and write summary.json."""
        session = cls(cfg, folder, machine=machine, context=context)
        folder.mkdir(parents=True, exist_ok=True)
        line, in_log = device_row(machine.choice)
        session.screen.say(line, in_log=in_log)
        forget_graph(folder / GRAPH)  # of an earlier run in this directory
        tracking = session.settings.tracking
        publishing: AbstractContextManager[Publisher | None] = nullcontext()
        if tracking.enabled and session._publishes:
            grace, ahead = tracking.grace_seconds, context.publisher
            names = chosen_trackers(tracking)
            publishing = Publisher.start(folder, tracking.uri, grace_seconds=grace, ahead=ahead, trackers=names)
        with publishing as session._publisher, session.screen.with_warnings():
            with optimizers_without_dynamo(), session._open:
                yield session
            session._close()

    def begin(self, cfg: DictConfig, parts: Parts, *, num_together: int = 1) -> None:
        """Open the journal, listen to signals, and write what the run is. num_together: runs that take each step together."""
        context, folder, settings = self._context, self.folder, self.settings
        if context.repetition is not None and context.repetition.check is not None:
            context.repetition.check(parts)
        self._parts, self._result = parts, Result(best=parts.best)
        journal = self._open.enter_context(Journal(folder, say=self.say))
        (folder / summaries.FILE).unlink(missing_ok=True)  # of a part before: one that is killed now has not finished
        (folder / "rerun.yaml").write_text(self._rerun)
        write_card(folder, parts.card)
        origin.sign(folder, shown(settings.tracking.uri) if settings.tracking.enabled else "")
        self.reporter = Reporter(
            folder,
            journal,
            self.screen,
            publisher=self._publisher,
            trial=context.trial,
            batch_size=parts.train.batch_size * settings.train.accumulate_steps,
        )
        grace, end_now = settings.train.grace_seconds, self._end_now if context.owns_process else None
        self.stop = self._open.enter_context(listening(grace_seconds=grace, end_now=end_now))
        self.reporter.log_start(cfg, parts, machine=self._machine, context=context, num_together=num_together)
        for line, in_log in describe_parts(settings, parts):
            self.screen.say(line, in_log=in_log)
        self._setup = time.perf_counter() - self._began
        if settings.train.check:
            self.say(f"check:  data, model, optimizer ({self._setup:.2f} s)")
            if parts.train.num_batches > 1:
                self.say(f"check:  the last batch of train: {parts.train.num_rows % parts.train.batch_size} rows")
        else:
            self.say(row("run", short(folder)))

    def say(self, text: str) -> None:
        self.screen.say(text)

    def end(self, result: Result, ranks: Ranks, *, shows: bool = True) -> None:
        """Log the model, draw the plots and record the status. An error in this becomes the run's error.

        shows: Whether to log a model and draw plots.
        """
        self._result = result
        for finding in result.findings:
            self.say(row("guard", str(finding)))
        if result.status != "failed":  # else another process may be gone
            ranks.leave()
        self._trained = time.perf_counter()
        is_finished = result.status == "finished"
        has_model = is_finished and bool(self.settings.tracking.log_model) and shows
        rows: Any = None
        series: Mapping[str, Series] = {}
        with self._failing():
            series = read_series(self.folder)
            if has_model or (is_finished and (self._parts.val or self._parts.train).indexed() is not None):
                rows = example_rows(self._parts)
            if has_model:
                self.reporter.log_model(self._parts, self.settings, rows, step=result.best.step)
        with self._failing():
            if shows:
                self._draw(series)
            if (self.folder / TRACES).is_dir():
                self.reporter.journal.event("artifact", path=TRACES, to=TRACES)
        with self._failing():
            status = MLFLOW_STATUS[result.status]
            self.reporter.journal.event("end", status=status, end_ms=int(time.time() * 1000))
        if result.status == "finished":  # after the end is on the disk, as hints run the user's model
            times, _ = summaries.training_times(result)
            self._hints = hints.find(self._parts, result, series=series, rows=rows, time=times)

    def _draw(self, series: Mapping[str, Series]) -> None:
        parts, result, failures = self._parts, self._result, list[str]()
        of = f"{self.settings.model} on {parts.source.name}, {parts.device}"
        if illustrate(parts, result, self.folder, series=series, of=of, say=failures.append):
            self.reporter.journal.event("artifact", path="plots", to="plots")
        for line in failures:
            self.say(line)
        if self.settings.train.check and result.status == "finished" and failures:
            result.status, result.error = "failed", failures[0]

    def _close(self) -> None:
        if self._publisher is not None:
            self._write_summary()  # it remains if the process is killed while it waits
            began = time.perf_counter()
            self._ack = self._wait_for_tracker(self._publisher, within=self.stop.seconds_left)
            self._waited = time.perf_counter() - began
        self.summary = summary = self._write_summary()
        if self.settings.train.check:  # nothing stays of it
            if summary.status != "finished":
                self.say(f"✗ {summary.status}   {summary.error or summary.ending}")
            self.screen.hints(summary.hints)
        else:
            rows = last_rows(self.settings, summary, self.folder, publishes=self._publishes)
            self.screen.result(summary, folder=self.folder, rows=rows)
        if self._context.member is None:
            self._notify(summary)

    def _notify(self, summary: Summary) -> None:
        best, name = summary.best, self.settings.name or short(self.folder)
        values = [] if best["value"] is None else [f"{best['metric']} {best['value']:.4g} (step {best['step']})"]
        text = ", ".join([f"{name}: {summary.status} after {summary.seconds['total']:.0f} s", *values])
        facts = {
            key: getattr(summary, key) for key in ("status", "ending", "error", "run_id", "device", "metrics", "best")
        }
        text += f": {summary.error}" if summary.error else ""
        notify(self._notify_url, text, facts | {"directory": str(self.folder)}, say=self.say)

    def _write_summary(self) -> Summary:
        with self._failing():
            summary = self._summarize()
            summary.write(self.folder)
            return summary
        return self._summarize()  # of a full disk

    def _summarize(self) -> Summary:
        result, parts, best, num_points = self._result, self._parts, self._result.best, self.reporter.points
        tracking, choice, now = self.settings.tracking, self._machine.choice, time.perf_counter()
        outer, finish = {"start": self._before, "setup": self._setup}, now - (self._trained or now)
        outside = {"start-up": self._before + self._setup, "tracker": self._waited, "finish": finish - self._waited}
        total = self._before + now - self._began
        training, step = summaries.training_times(result)
        per_second = 1 / result.seconds["train"] if result.seconds["train"] else 0.0
        peak_bytes, whose = result.peak_memory or backends.peak_memory(parts.device)
        num_reads = sum(finding.count for finding in result.findings if finding.kind in ("host read", "copy"))
        pending = {"points_written": 0, "points_pending": num_points if tracking.enabled else 0}
        return Summary(
            status=result.status,
            error=result.error and without_password(result.error),
            run_id=self._ack.run_id if self._ack else None,
            tracking_uri=without_password(tracking.uri) if tracking.enabled else None,
            device=choice.device,
            device_reason=choice.reason,
            num_epochs=result.num_epochs,
            num_steps=result.num_steps,
            num_samples=result.num_samples,
            num_parameters=parts.num_parameters,
            metrics=self.reporter.metrics,
            best={"metric": best.metric, "value": best.value, "step": best.step, "mode": best.mode},
            ending=result.ending,
            seconds=outer | result.seconds | {"finish": finish, "total": total},
            time=summaries.whole_time(training, total=total, outside=outside),
            step=step,
            steps_per_second=result.num_steps * per_second,
            samples_per_second=result.num_samples * per_second,
            peak_memory_bytes=peak_bytes,
            peak_memory_of=whose,
            hints=self._hints,
            host_reads={"pulls": result.pulls, "points": num_points, "unexpected": num_reads},
            tracker=self._ack.counts if self._ack else pending,
            versions=versions(),
            num_processes=result.num_processes,
            exit_code=self.stop.exit_code or int(result.status == "failed"),
        )

    @property
    def _publishes(self) -> bool:
        member = self._context.member
        return member is None or member.publishes

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except CODE_ERRORS as error:  # e.g., of the model when it is logged, or of a full disk
            if self._result.status != "failed":
                fail(self._result, error)

    def _wait_for_tracker(self, publisher: Publisher, *, within: float) -> Ack:
        pending = publisher.ack().points_pending
        if pending > MANY_POINTS:
            self.say(f"tracking: {pending:,} points are on their way; Ctrl-C leaves that to the background")
        try:
            ack = publisher.finish(within=within)
        except KeyboardInterrupt:
            self.say("tracking: not waited for; what is left goes to MLflow in the background")
            ack = publisher.ack()
        if not ack.is_complete:
            why = f" ({ack.error})" if ack.error else ""
            uri = without_password(self.settings.tracking.uri)
            points, files = (ack.counts.get(name, 0) for name in ("points_pending", "files_pending"))
            left = [f"{points:,} points"] * bool(points or not files) + [f"{files} artifacts"] * bool(files)
            self.say(f"tracking: {' and '.join(left)} have not reached {uri}{why}; the run's folder keeps them")
        more = len(ack.warnings) - MAX_WARNINGS
        for warning in [*ack.warnings[:MAX_WARNINGS], *[f"{more} more of the kind in {LOG}"] * (more > 0)]:
            self.say(f"tracking: {warning}")
        for sentence in publisher.unfinished_trackers():
            self.say(f"tracking: {sentence}")
        return ack

    def _end_now(self, stop: Stop, why: str) -> NoReturn:
        """End this process without waiting.

        The publisher notices, sends what the journal holds, and marks the run as killed.
        """
        with suppress(Exception):  # the training continues in parallel, and may be at any point
            self._result.status, self._result.error = "killed", why
            self._summarize().write(self.folder)
            self.screen.end_now(f"ended at once: {why}; what its last checkpoint and its journal hold is kept")
            self.say(row("resume", f"python -m runner resume {shlex.quote(short(self.folder))}"))
        for child in multiprocessing.active_children():  # that read data
            child.kill()
        os._exit(stop.exit_code)


def check_directory(folder: Path, cfg: DictConfig) -> None:
    """Hide the secrets in a run's directory. Raises: RunnerError for files that no run of this configuration has written."""
    check_folder(folder)
    mask_folder(folder, cfg)
    recipes.check(folder)
