"""The parent run of a sweep in MLflow, with the report: write its journal, and start the uploader.

With launchers/local.py, the uploader also sends the jobs' journals. outcome.py writes the best job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from omegaconf import DictConfig, OmegaConf

from runner.config import origin
from runner.errors import without_password
from runner.experiment.provenance import NOTE, described, user_tags
from runner.experiment.summary import Summary
from runner.experiment.terminal import short
from runner.sweep import outcome
from runner.sweep.jobs.ledger import Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.report.report import Report
from runner.sweep.report.stored import MAX_SEEDS
from runner.tracking import store_uri
from runner.tracking.ack import Ack, read_ack
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events
from runner.tracking.journal_records import FILE, has_records
from runner.tracking.publisher import Publisher
from runner.training.signals import Stop
from runner.version import __version__

ARTIFACTS = ("report.html", "report.csv", "report.json")
RUN_SECONDS = 30.0  # wait for the best job's run: a short sweep ends before MLflow is imported
QUIET_SECONDS = 2.0  # a longer wait for MLflow is printed
STOPPED_SECONDS = 5.0  # wait for MLflow after a signal
REMIND_SECONDS = 60.0


class Parent:
    """The sweep's journal, and the uploader of it and its jobs' journals."""

    def __init__(
        self,
        sweep: Sweep,
        config: DictConfig,
        journal: Journal,
        publisher: Publisher | None,
        experiment: str,
        follows: bool,
    ) -> None:
        """Use Parent.open(). publisher: None without tracking."""
        self._sweep, self._config, self._journal, self.publisher = sweep, config, journal, publisher
        self._follows = follows
        self.assigned = {
            "sweep": short(sweep.folder),
            "uid": sweep.uid,
            "experiment": experiment,
            "publishes": not follows,
        }

    @classmethod
    @contextmanager
    def open(
        cls, sweep: Sweep, config: DictConfig, prepared: Sequence[PreparedJob], *, follows: bool
    ) -> Iterator[Parent]:
        """Start or resume the sweep's run. follows: whether the uploader also sends the jobs' journals."""
        first_said = (event["experiment"] for event in read_events(sweep.folder) if event["kind"] == "start")
        experiment = next(first_said, None) or experiment_of(prepared[0].config if prepared else config)
        uri, grace, is_tracked = str(config.tracking.uri), config.tracking.grace_seconds, config.tracking.enabled
        published: AbstractContextManager[Publisher | None] = (
            nullcontext()
        )  # as a run's journal, sync may send it later
        if is_tracked:
            published = Publisher.start(sweep.folder, uri, grace_seconds=grace)
        with published as publisher, Journal(sweep.folder) as journal:
            origin.sign(sweep.folder, store_uri.shown(uri) if is_tracked else "")
            words = " ".join(map(without_password, sweep.overrides))
            journal.event(
                "start",
                uid=sweep.uid,
                experiment=experiment,
                run_name=config.name or f"sweep {words}"[:200],
                start_ms=sweep.began_ms,
                params={"sweep": words},
                tags={
                    "sweep": short(sweep.folder),
                    "runner_version": __version__,
                    "mlflow.source.name": "python -m runner -m",
                    "mlflow.source.type": "LOCAL",
                    NOTE: described(config, outcome.command(sweep.overrides)),
                    **user_tags(config),
                    **({MAX_SEEDS: str(sweep.max_seeds)} if sweep.max_seeds is not None else {}),
                },
                system_metrics=False,
            )
            parent = cls(sweep, config, journal, publisher, experiment, follows)
            parent._take_up()
            yield parent

    def tell_summaries(self, sweep: Sweep) -> None:
        """Add the MLflow run ids to the summaries of the jobs."""
        if self.publisher is None:
            return
        for job in sweep.jobs.values():
            folder = sweep.folder_of(job)
            if Summary.read(folder).tracking_uri is not None:
                ack = read_ack(folder)
                Summary.note(folder, run_id=ack.run_id, tracker=ack.counts)

    def end(self, status: str, report: Report, *, stop: Stop, say: Callable[[str], None]) -> None:
        """Journal the best job, the report's files and the status, then wait for MLflow.

        A signal ends the wait and the uploader; `sync` sends the rest.
        """
        if not self._follows:
            self._take_up()
        run_id = None
        waiting = _Waiting(self._sweep, stop, say)
        if report.best is not None and self.publisher is not None:
            best = self._sweep.folder / report.best.folder
            seconds = 0.0 if status == "KILLED" else RUN_SECONDS
            run_id = self.publisher.wait_for_run(best, seconds=seconds, keeps_waiting=waiting.continues).run_id
        note = described(self._config, outcome.note(report))
        outcome.tell(self._journal, self._sweep.folder, report, run_id=run_id, note=note)
        for name in ARTIFACTS:
            if (self._sweep.folder / name).is_file():
                self._journal.event("artifact", path=name, to="")
        self._journal.event("end", status=status, end_ms=int(time.time() * 1000))
        if self.publisher is not None:
            try:
                self.publisher.finish(keeps_waiting=waiting.continues)
            except KeyboardInterrupt:  # the second Ctrl-C
                self.publisher.stop()
            if stop.signal is not None:
                self.publisher.stop()

    def _take_up(self) -> None:
        """Return the jobs of this sweep that MLflow does not have completely, e.g., from machines without the store."""
        if self.publisher is None:
            return
        for job in self._sweep.jobs.values():
            folder = self._sweep.folder_of(job)
            ack = read_ack(folder)
            is_ours = self._follows or ack.run_id is None
            if job.is_done and is_ours and has_records(folder / FILE) and not ack.is_complete:
                self.publisher.follow(folder)
                self.publisher.gone(folder)


class _Waiting:
    def __init__(self, sweep: Sweep, stop: Stop, say: Callable[[str], None]) -> None:
        self._sweep, self._stop, self._say = sweep, stop, say
        now = time.monotonic()
        self._says_at = now + QUIET_SECONDS
        self._ends_at = None if stop.signal is None else now + STOPPED_SECONDS

    def continues(self) -> bool:
        now = time.monotonic()
        if self._stop.signal is not None:
            return self._ends_at is not None and now < self._ends_at
        if now > self._says_at and (left := [ack for ack in acks(self._sweep) if not ack.is_complete]):
            self._says_at = now + REMIND_SECONDS
            whole = f"{len(left)} of {len(acks(self._sweep))} runs"
            self._say(f"mlflow   {whole} are not complete there yet; Ctrl-C stops the wait, and `sync` sends the rest")
        return True


def acks(sweep: Sweep) -> list[Ack]:
    """Return the Ack of the sweep's run and of each job with a journal."""
    folders = (sweep.folder, *map(sweep.folder_of, sweep.jobs.values()))
    return [read_ack(folder) for folder in folders if has_records(folder / FILE)]


def experiment_of(config: DictConfig) -> str:
    """Return the experiment of a new sweep: that of its first job."""
    name = OmegaConf.select(config, "tracking.experiment") or OmegaConf.select(config, "data.name")
    return str(name or config.hydra.runtime.choices.get("data"))
