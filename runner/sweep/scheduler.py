"""Has every job run to its end: starts jobs as the launcher has room, and notes in the ledger how each ended.

Called by sweep.py, in the sweep's process. What a source of jobs and a launcher must do is said here (Source, JobLauncher).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from runner.device import Hardware
from runner.errors import first_line
from runner.experiment.summary import FILE, Summary
from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.sweep.jobs.prepare import Prepared
from runner.sweep.jobs.run_job import ALONE, Assignment
from runner.sweep.jobs.slots import DevicesFor
from runner.sweep.launchers.process_pool import Ended, NotTakenError, ProcessPool
from runner.sweep.progress_table import Table
from runner.tracking.publisher import Publisher
from runner.training.signals import Stop

LOOK_SECONDS = 0.5
#: signals by which a process ends itself; by all others somebody ended it
CRASHES = {"SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGBUS": "bus error", "SIGILL": "illegal instruction"}


class Source(Protocol):
    """Where jobs come from: a list, or a search that thinks of the next one when there is room for it."""

    def next(self, num_waiting: int) -> Prepared | None:
        """A job to start when there is room; None when there is none now. num_waiting: jobs that wait for room already."""
        ...

    def ended(self, job: Job, summary: Summary) -> None:
        """Hears how a job ended, before the ledger does; it may find that a job failed which thinks it finished."""
        ...


class JobLauncher(Protocol):
    """What a launcher does for a sweep, beside Hydra's own interface."""

    is_here: bool  # whether the jobs run on the machine that asks
    follows: bool  # whether the sweep sends the jobs' journals; else each job publishes for itself

    @property
    def devices_for(self) -> DevicesFor:
        """Which devices a job's policy may take where the jobs run; raises a RunnerError for none. It pickles."""
        ...

    def process_pool(self) -> ProcessPool:
        """Processes on this machine that have torch, to check the jobs in."""
        ...

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        """Makes ready for jobs on these devices, and says in words where they will run."""
        ...

    def start(self, prepared: Prepared, assigned: Assignment) -> str | None:
        """Starts the job and returns its device in words; None when there is no room for it now: it will be asked again."""
        ...

    def ended(self, seconds: float) -> list[Ended]:
        """The jobs that have ended; waits for the first one, about so long. Raises: NotTakenError where a queue refuses some."""
        ...

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Tells every job to save its state and end; SIGKILL ends it and all that it started. May be called again."""
        ...

    def close(self) -> None:
        """Leaves nothing running."""
        ...


@dataclass
class Books:
    """What a sweep is noted in while it runs.

    assigned: what every job is told of the sweep (fields of Assignment). publisher: sends the jobs' journals (None: they
    do it themselves, or nothing is tracked).
    """

    sweep: Sweep
    ledger: Ledger
    assigned: dict[str, Any]
    publisher: Publisher | None
    table: Table
    waiting: list[Prepared] = field(default_factory=list)
    running: dict[int, Prepared] = field(default_factory=dict)  # by the number of their first job

    def note_start(self, prepared: Prepared, device: str) -> None:
        self.waiting.remove(prepared)
        self.running[prepared.job.number] = prepared
        for job in prepared.jobs:
            job.state, job.device = "running", device
            if self.publisher is not None:
                self.publisher.follow(self.sweep.folder_of(job))
        self.ledger.note(*prepared.jobs)

    def note_refusal(self, numbers: Sequence[int]) -> None:
        """Jobs that were started, and that a queue does not take: they are as before."""
        for number in numbers:
            jobs = self.running.pop(number).jobs
            for job in jobs:
                job.state, job.device = "planned", None
            self.ledger.note(*jobs)

    def part(self, prepared: Prepared) -> list[Job]:
        """Has those that could not be trained together wait again, each for itself; returns the other jobs."""
        each = [prepared, *prepared.others] if prepared.others else []
        said = {member.job.number: Summary.read(self.sweep.folder_of(member.job)) for member in each}
        alone = [replace(member, others=()) for member in each if said[member.job.number].status == ALONE]
        for member in alone:
            member.job.state = "planned"
            (self.sweep.folder_of(member.job) / FILE).unlink(missing_ok=True)
        if alone:
            self.waiting += alone
            reason = said[alone[0].job.number].error
            which = f"{alone[0].job.name}{', ...' if len(alone) > 1 else ''}"
            self.table.say(f"batch    {len(alone)} jobs are trained one by one: {reason} ({which})")
        return [job for job in prepared.jobs if job.number not in {member.job.number for member in alone}]

    def note_end(self, job: Job, summary: Summary) -> None:
        self.ledger.note(job)
        if self.publisher is not None:
            self.publisher.gone(self.sweep.folder_of(job))
        self.table.ended(job, summary)


def conduct(
    source: Source,
    places: JobLauncher,
    books: Books,
    *,
    stop: Stop,
    grace_seconds: float,
    max_seconds: float | None = None,
) -> None:
    """Starts jobs as places get free, and notes how they end, until the source has no more or somebody says stop.

    max_seconds: then it is as if somebody did (sweep.max_seconds). Raises: NotTakenError where a queue refuses jobs.
    """
    deadline: float | None = None  # for jobs that were told to end
    end = time.monotonic() + (math.inf if max_seconds is None else max_seconds)
    while True:
        is_stopped = stop.signal is not None or time.monotonic() > end
        if not is_stopped:
            _start(source, places, books)
        elif deadline is None:
            places.stop()
            deadline = time.monotonic() + grace_seconds
        elif time.monotonic() > deadline:
            places.stop(signal.SIGKILL)
        if not books.running and (not books.waiting or is_stopped):
            if is_stopped and _is_left(source, books) and stop.signal is None:
                books.table.say(f"time:   sweep.max_seconds={max_seconds:g} was over before all jobs were at their end")
            return
        books.table.show(books.sweep)
        if books.publisher is not None and (problem := books.publisher.first_failure()) is not None:
            books.table.say(f"MLflow  {problem}; the jobs continue, and their journals keep everything")
        try:
            found = places.ended(LOOK_SECONDS)
        except KeyboardInterrupt:  # the second Ctrl-C
            places.stop(signal.SIGKILL)
            continue
        except NotTakenError as error:
            books.note_refusal(error.numbers)
            raise
        for ended in found:
            prepared = books.running.pop(ended.number)
            was_told = is_stopped or stop.signal is not None or ended.is_interrupted
            for job in books.part(prepared):
                summary = settle(job, books.sweep.folder_of(job), ended.code, is_stopped=was_told, cause=ended.cause)
                source.ended(job, summary)
                books.note_end(job, summary)


def _start(source: Source, places: JobLauncher, books: Books) -> None:
    while True:
        for prepared in list(books.waiting):
            assigned = Assignment(name=prepared.job.name, **books.assigned, **prepared.assigned)
            device = places.start(prepared, assigned)
            if device is not None:
                books.note_start(prepared, device)
        fresh = source.next(len(books.waiting))
        if fresh is None:
            return
        books.waiting.append(fresh)


def _is_left(source: Source, books: Books) -> bool:
    """Whether a sweep that is stopped has more to do. Where its source thinks of a job when there is room for it, the next
    one is in the ledger from here on: it tells whoever reads that, and sweep.resume begins with it."""
    return not all(job.is_done for job in books.sweep.jobs.values()) or source.next(0) is not None


def settle(job: Job, folder: Path, code: int | None, *, is_stopped: bool, cause: str | None = None) -> Summary:
    """Writes into the job how it ended, and leaves a summary in its folder if it could not do that itself.

    code: of its process. is_stopped: whether it was told to save its state and end: then it goes on another time.
    cause: why it ended, where a launcher knows.
    """
    summary = Summary.read(folder)
    if summary.has_ended:
        job.state, job.error = summary.status, first_line(summary.error) if summary.error else None
        return summary
    if is_stopped:
        job.state, job.error = "interrupted", None
        return summary
    job.state, job.error = _cause(code)
    job.error = cause or job.error
    summary = replace(summary, status=job.state, error=job.error, device=job.device)
    summary.write(folder)
    return summary


def _cause(code: int | None) -> tuple[str, str]:
    if code is None:
        return "killed", "the process that starts the jobs was killed, and this one with it"
    number = code - 128 if code > 0 else -code  # a run that was told to end says so as shells have it
    name = next((each.name for each in signal.Signals if each == number), None)
    if code >= 0 and name is None:  # of sys.exit(-1), 255
        return "failed", f"its process ended with exit code {code} and left no summary"
    name = name or f"signal {number}"
    if name in CRASHES:
        return "failed", f"its process crashed: {name}, {CRASHES[name]}"
    if name == "SIGKILL":
        return "killed", "SIGKILL: by the system when memory ran out, or by somebody"
    return "killed", f"{name}, from somewhere else"
