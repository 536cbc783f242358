"""The parent run of a sweep in MLflow: its journal with the best job, its metrics and the report, and its uploader.

With launchers/local.py, the uploader also sends the jobs' journals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from runner.config import origin
from runner.errors import without_password
from runner.experiment.context import Membership, RunContext
from runner.experiment.provenance import NOTE, described, user_tags
from runner.experiment.summary import Summary
from runner.experiment.terminal import short
from runner.sweep.jobs.ledger import Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.report import tables
from runner.sweep.report.report import Report
from runner.sweep.report.results import best_first
from runner.tracking import store_uri
from runner.tracking.ack import Ack, read_ack
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events, read_points
from runner.tracking.journal_records import FILE, has_records
from runner.tracking.publisher import Publisher
from runner.tracking.trackers import chosen_trackers
from runner.training.signals import Stop
from runner.version import __version__

ARTIFACTS = ("report.html", "report.csv", "report.json")
MAX_SEEDS = "max_seeds"  # the tag of a sweep's run: see Sweep.max_seeds
UNKNOWN = "unknown"  # MLflow did not answer at the end of the sweep
RUN_SECONDS = 30.0  # wait for the best job's run: a short sweep ends before MLflow is imported
QUIET_SECONDS = 2.0  # a longer wait for MLflow is printed
STOPPED_SECONDS = 5.0  # wait for MLflow after a signal


class Parent:
    """The sweep's journal, and the uploader of it and its jobs' journals."""

    def __init__(
        self, sweep: Sweep, config: DictConfig, journal: Journal, publisher: Publisher | None, *, is_here: bool
    ) -> None:
        """Use Parent.open(). publisher: None without tracking."""
        self._sweep, self._config, self._journal, self.publisher = sweep, config, journal, publisher
        self._is_here = is_here

    @classmethod
    @contextmanager
    def open(
        cls, sweep: Sweep, config: DictConfig, prepared: Sequence[PreparedJob], *, is_here: bool
    ) -> Iterator[Parent]:
        """Start or resume the sweep's run. is_here: Whether the uploader also sends the jobs' journals."""
        uri, is_tracked = str(config.tracking.uri), config.tracking.enabled
        # without tracking as a run's journal, which sync may send later
        publishing: AbstractContextManager[Publisher | None] = nullcontext()
        if is_tracked:
            names = chosen_trackers(config.tracking)
            grace = config.tracking.grace_seconds
            publishing = Publisher.start(sweep.folder, uri, grace_seconds=grace, trackers=names)
        with publishing as publisher, Journal(sweep.folder) as journal:
            origin.sign(sweep.folder, store_uri.shown(uri) if is_tracked else "")
            parent = cls(sweep, config, journal, publisher, is_here=is_here)
            parent._begin(prepared[0].config if prepared else config)
            parent._send_jobs()
            yield parent

    def _begin(self, first: DictConfig) -> None:
        sweep, config = self._sweep, self._config
        starts = (event["experiment"] for event in read_events(sweep.folder) if event["kind"] == "start")
        # of a new sweep, that of its first job
        own = OmegaConf.select(first, "tracking.experiment") or OmegaConf.select(first, "data.name")
        experiment = next(starts, None) or str(own or first.hydra.runtime.choices.get("data"))
        directory = short(sweep.folder)
        self.context = RunContext(member=Membership(directory, sweep.uid, experiment, "", publishes=not self._is_here))
        overrides = " ".join(map(without_password, sweep.overrides))
        self._journal.event(
            "start",
            uid=sweep.uid,
            experiment=experiment,
            run_name=config.name or f"sweep {overrides}"[:200],
            start_ms=sweep.began_ms,
            params={"sweep": overrides},
            tags={
                "sweep": directory,
                "runner_version": __version__,
                "mlflow.source.name": "python -m runner -m",
                "mlflow.source.type": "LOCAL",
                NOTE: described(config, command(sweep.overrides)),
                **user_tags(config),
                **({MAX_SEEDS: str(sweep.max_seeds)} if sweep.max_seeds is not None else {}),
            },
            system_metrics=False,
            trackers=chosen_trackers(config.tracking),
        )

    def note_runs(self) -> None:
        """Add the MLflow run ids to the summaries of the jobs."""
        if self.publisher is None:
            return
        for job in self._sweep.jobs.values():
            folder = self._sweep.folder_of(job)
            if Summary.read(folder).tracking_uri is not None:
                ack = read_ack(folder)
                Summary.note(folder, run_id=ack.run_id, tracker=ack.counts)

    def end(self, status: str, report: Report, *, stop: Stop, say: Callable[[str], None]) -> None:
        """Journal the best job, the report's files and the status, then wait for MLflow.

        A signal ends the wait and the uploader; `sync` sends the rest.
        """
        if not self._is_here:
            self._send_jobs()
        run_id, keeps_waiting = None, _waiting(self._sweep, stop, say)
        if report.best is not None and self.publisher is not None:
            best = self._sweep.folder / report.best.folder
            seconds = 0.0 if status == "KILLED" else RUN_SECONDS
            run_id = self.publisher.wait_for_run(best, seconds=seconds, keeps_waiting=keeps_waiting).run_id
        tags = tags_of(report, run_id=run_id, config=self._config)
        write_outcome(self._journal, self._sweep.folder, report, tags=tags)
        for name in ARTIFACTS:
            if (self._sweep.folder / name).is_file():
                self._journal.event("artifact", path=name, to="")
        self._journal.event("end", status=status, end_ms=int(time.time() * 1000))
        if self.publisher is not None:
            try:
                self.publisher.finish(keeps_waiting=keeps_waiting)
            except KeyboardInterrupt:  # the second Ctrl-C
                self.publisher.stop()
            if stop.signal is not None:
                self.publisher.stop()

    def _send_jobs(self) -> None:
        """Send the jobs of this sweep that MLflow does not have completely, e.g., from machines without the store."""
        if self.publisher is None:
            return
        for job in self._sweep.jobs.values():
            folder = self._sweep.folder_of(job)
            ack = read_ack(folder)
            is_ours = self._is_here or ack.run_id is None
            if job.is_done and is_ours and has_records(folder / FILE) and not ack.is_complete:
                self.publisher.follow(folder)
                self.publisher.gone(folder)


def _waiting(sweep: Sweep, stop: Stop, say: Callable[[str], None]) -> Callable[[], bool]:
    """Return a function that returns whether to wait for MLflow any longer, and prints once why."""
    began, was_stopped, is_printed = time.monotonic(), stop.signal is not None, False

    def continues() -> bool:
        nonlocal is_printed
        waited = time.monotonic() - began
        if stop.signal is not None:
            return was_stopped and waited < STOPPED_SECONDS
        if not is_printed and waited > QUIET_SECONDS and (left := [ack for ack in acks(sweep) if not ack.is_complete]):
            is_printed = True
            whole = f"{len(left)} of {len(acks(sweep))} runs"
            say(f"mlflow   {whole} are not complete there yet; Ctrl-C stops the wait, and `sync` sends the rest")
        return True

    return continues


def acks(sweep: Sweep) -> list[Ack]:
    """Return the Ack of the sweep's run and of each job with a journal."""
    folders = (sweep.folder, *map(sweep.folder_of, sweep.jobs.values()))
    return [read_ack(folder) for folder in folders if has_records(folder / FILE)]


def write_outcome(journal: Journal, folder: Path, report: Report, *, tags: Mapping[str, str]) -> None:
    """Append what the sweep's journal does not have yet, as a resumed sweep may have another best job.

    The step of its metrics is the number of finished jobs, as MLflow shows the value of the highest step.

    Args:
        journal: The sweep's, in `folder`.
        tags: As tags_of() returns them.
    """
    known: dict[str, str] = {}
    for event in read_events(folder):
        known |= event.get("tags") or {}
    if not tags.items() <= known.items():
        journal.event("tags", tags=tags)
    if report.best is None:
        return
    before = {name: points[-1][1] for name, points in read_points(folder).items()}
    now = dict.fromkeys(before, math.nan) | metrics_of(report)  # NaN for metrics of only the former best job
    if before.keys() != now.keys() or any(repr(float(before[name])) != repr(float(now[name])) for name in now):
        journal.points(list(now), [report.counts["finished"]], [int(time.time() * 1000)], [list(now.values())])


def tags_of(report: Report, *, run_id: str | None, config: DictConfig) -> dict[str, str]:
    """Return tags with the best job and its metric; for several objectives the table's first job.

    run_id: Of the best job (None: MLflow does not have it).
    """
    parts = [
        command(report.overrides),
        f"{tables.counts(report)}. The table and the curves are in report.html, an artifact.",
    ]
    if report.best is None:
        return {NOTE: described(config, "\n\n".join(parts))}
    values = ", ".join(f"{goal.metric} {tables.value(report.best.value(goal.metric))}" for goal in report.goals)
    parts.insert(0, f"**The best job is {report.best.job}, {report.best.name}**: {values}")
    return {
        NOTE: described(config, "\n\n".join(parts)),
        "best_job": str(report.best.job),
        "best_job_name": report.best.name,
        "best_job_run_id": run_id or UNKNOWN,
        "goals": ", ".join(f"{goal.mode} {goal.metric}" for goal in report.goals),
    }


def command(overrides: Iterable[str]) -> str:
    """Return the command of the sweep in Markdown."""
    return f"A sweep: `python -m runner -m {' '.join(map(without_password, overrides))}`"


def metrics_of(report: Report) -> dict[str, float]:
    """Return the best job's last metrics; best/METRIC is the best value of any job at any step."""
    if report.best is None:
        return {}
    firsts = [(goal.metric, best_first(report.results, (goal,))[0]) for goal in report.goals]
    bests = {f"best/{metric}": first.value(metric) for metric, first in firsts}
    front = {"best/pareto_front": float(len(report.front))} if report.front else {}
    return report.best.metrics | {name: value for name, value in bests.items() if value is not None} | front
