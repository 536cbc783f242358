"""Run all jobs: start them as the launcher has free slots, and write to the ledger how each ended.

JobSource and JobLauncher are the interfaces of a source of jobs and a launcher.
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
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.jobs.run_job import ALONE, Assignment
from runner.sweep.jobs.slots import DevicesFor
from runner.sweep.launchers.process_pool import Ended, NotTakenError, ProcessPool
from runner.sweep.progress_table import Table
from runner.tracking.publisher import Publisher
from runner.training.signals import Stop

LOOK_SECONDS = 0.5
#: signals of a crash; other signals stop the process
CRASHES = {"SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGBUS": "bus error", "SIGILL": "illegal instruction"}


class JobSource(Protocol):
    """Jobs to run: a list, or a search that creates the next job when a slot is free."""

    def next(self, num_waiting: int) -> PreparedJob | None:
        """Return the next job, or None if no job is ready. num_waiting: Jobs that already wait for a slot."""
        ...

    def ended(self, job: Job, summary: Summary) -> None:
        """Note how a job ended, before the ledger does; may change the state of a finished job to failed."""
        ...


class JobLauncher(Protocol):
    """A launcher's interface to a sweep, in addition to Hydra's."""

    is_here: bool  # whether the jobs run on this machine
    follows: bool  # whether the sweep's uploader sends the jobs' journals; else each job has one

    @property
    def devices_for(self) -> DevicesFor:
        """A function that returns the devices for a policy where the jobs run, or raises a RunnerError. It can be pickled."""
        ...

    def process_pool(self) -> ProcessPool:
        """Processes on this machine in which jobs are checked."""
        ...

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        """Prepare for jobs on these devices, and return a description of the slots."""
        ...

    def start(self, prepared: PreparedJob, assigned: Assignment) -> str | None:
        """Start the job and return its device, or None without a free slot; called again later."""
        ...

    def ended(self, seconds: float) -> list[Ended]:
        """Return the ended jobs; waits up to about `seconds` for the first one. Raises: NotTakenError if a queue refuses jobs."""
        ...

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Signal every job to save its state and end; SIGKILL also ends its child processes. Can be repeated."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


@dataclass
class SweepState:
    """The state of a running sweep.

    Attributes:
        assigned: Fields of every job's Assignment.
        publisher: Sends the jobs' journals (None: each job has its own, or tracking is off).
        running: By the number of a group's first job.
    """

    sweep: Sweep
    ledger: Ledger
    assigned: dict[str, Any]
    publisher: Publisher | None
    table: Table
    waiting: list[PreparedJob] = field(default_factory=list)
    running: dict[int, PreparedJob] = field(default_factory=dict)

    def note_start(self, prepared: PreparedJob, device: str) -> None:
        self.waiting.remove(prepared)
        self.running[prepared.job.number] = prepared
        for job in prepared.jobs:
            job.state, job.device = "running", device
            if self.publisher is not None:
                self.publisher.follow(self.sweep.folder_of(job))
        self.ledger.note(*prepared.jobs)

    def note_refusal(self, numbers: Sequence[int]) -> None:
        """Note that a queue refused these jobs: they are planned again."""
        for number in numbers:
            jobs = self.running.pop(number).jobs
            for job in jobs:
                job.state, job.device = "planned", None
            self.ledger.note(*jobs)

    def part(self, prepared: PreparedJob) -> list[Job]:
        """Put the members of a group that can't be trained together back, one by one; return the other jobs."""
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


def run_jobs(
    source: JobSource,
    launcher: JobLauncher,
    state: SweepState,
    *,
    stop: Stop,
    grace_seconds: float,
    max_seconds: float | None = None,
) -> None:
    """Start jobs as slots get free, and note how they end, until the source has no more or a stop is requested.

    Args:
        max_seconds: Stops the sweep after this time (sweep.max_seconds).

    Raises:
        NotTakenError: If a queue refuses jobs.
    """
    deadline: float | None = None  # for stopped jobs
    end = time.monotonic() + (math.inf if max_seconds is None else max_seconds)
    while True:
        is_stopped = stop.signal is not None or time.monotonic() > end
        if not is_stopped:
            _start(source, launcher, state)
        elif deadline is None:
            launcher.stop()
            deadline = time.monotonic() + grace_seconds
        elif time.monotonic() > deadline:
            launcher.stop(signal.SIGKILL)
        if not state.running and (not state.waiting or is_stopped):
            if is_stopped and _is_left(source, state) and stop.signal is None:
                state.table.say(f"time:   sweep.max_seconds={max_seconds:g} was over before all jobs were at their end")
            return
        state.table.show(state.sweep)
        if state.publisher is not None and (problem := state.publisher.first_failure()) is not None:
            state.table.say(f"MLflow  {problem}; the jobs continue, and their journals keep everything")
        try:
            found = launcher.ended(LOOK_SECONDS)
        except KeyboardInterrupt:  # the second Ctrl-C
            launcher.stop(signal.SIGKILL)
            continue
        except NotTakenError as error:
            state.note_refusal(error.numbers)
            raise
        for ended in found:
            prepared = state.running.pop(ended.number)
            was_told = is_stopped or stop.signal is not None or ended.is_interrupted
            for job in state.part(prepared):
                summary = settle(job, state.sweep.folder_of(job), ended.code, is_stopped=was_told, cause=ended.cause)
                source.ended(job, summary)
                state.note_end(job, summary)


def _start(source: JobSource, launcher: JobLauncher, state: SweepState) -> None:
    while True:
        for prepared in list(state.waiting):
            assigned = Assignment(name=prepared.job.name, **state.assigned, **prepared.assigned)
            device = launcher.start(prepared, assigned)
            if device is not None:
                state.note_start(prepared, device)
        fresh = source.next(len(state.waiting))
        if fresh is None:
            return
        state.waiting.append(fresh)


def _is_left(source: JobSource, state: SweepState) -> bool:
    """Return whether a stopped sweep has more jobs. A search's next job is written to the ledger here, for sweep.resume."""
    return not all(job.is_done for job in state.sweep.jobs.values()) or source.next(0) is not None


def settle(job: Job, folder: Path, code: int | None, *, is_stopped: bool, cause: str | None = None) -> Summary:
    """Set the job's final state, and write a summary to its directory if the job could not.

    Args:
        code: Of its process.
        is_stopped: Whether a stop was requested: the job is then resumed later.
        cause: Why it ended, if the launcher knows.
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
    number = code - 128 if code > 0 else -code  # a stopped run exits with 128 + the signal
    name = next((each.name for each in signal.Signals if each == number), None)
    if code >= 0 and name is None:  # of sys.exit(-1), 255
        return "failed", f"its process ended with exit code {code} and left no summary"
    name = name or f"signal {number}"
    if name in CRASHES:
        return "failed", f"its process crashed: {name}, {CRASHES[name]}"
    if name == "SIGKILL":
        return "killed", "SIGKILL: by the system when memory ran out, or by somebody"
    return "killed", f"{name}, from somewhere else"
