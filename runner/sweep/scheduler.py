"""Run all jobs: start them as the launcher has free slots, and write to the ledger how each ended.

JobSource and Launcher are the interfaces of a source of jobs and of a launcher.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from runner.device import Hardware
from runner.errors import first_line
from runner.experiment.context import RunContext
from runner.experiment.summary import FILE, Summary
from runner.sweep.jobs.ledger import ALONE, Job, Ledger, Sweep
from runner.sweep.jobs.prepare import DevicesFor, PreparedJob, in_name_of
from runner.sweep.launchers.local import Capacity
from runner.sweep.launchers.process_pool import Ended, NotTakenError, ProcessPool
from runner.sweep.terminal import Table
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


class Rounds:
    """A source of jobs in rounds: the next round follows when all jobs of a round have ended."""

    def __init__(self, prepared: Sequence[PreparedJob], more: Callable[[], Sequence[PreparedJob]] = tuple) -> None:
        """more: Returns the next round's jobs; none ends the sweep."""
        self._left, self._more = deque(prepared), more
        self._running: set[int] = set()
        self._is_over = False

    def next(self, num_waiting: int) -> PreparedJob | None:
        if not self._left and not self._running and not num_waiting and not self._is_over:
            self._left.extend(self._more())
            self._is_over = not self._left
        if not self._left:
            return None
        prepared = self._left.popleft()
        self._running |= {job.number for job in prepared.jobs}
        return prepared

    def ended(self, job: Job, summary: Summary) -> None:
        self._running.discard(job.number)


class Launcher(Protocol):
    """Runs the jobs of a sweep, on this machine or on others."""

    is_here: bool  # whether the jobs are processes of the sweep's pool; its uploader then sends their journals, too
    preload: tuple[str, ...]  # modules that the sweep's process pool imports
    environment: Mapping[str, str]  # of that pool, added to this process's

    @property
    def devices_for(self) -> DevicesFor:
        """A function that returns the devices for a policy where the jobs run, or raises a RunnerError. It can be pickled."""
        ...

    def open(self, pool: ProcessPool, hardware: Hardware, devices: Collection[str]) -> Capacity:
        """Prepare for jobs on these devices. pool: The sweep's, which a launcher may use for its jobs."""
        ...

    def start(self, prepared: PreparedJob, context: RunContext) -> str | None:
        """Start the job and return its device, or None without a free slot; called again later."""
        ...

    def ended(self, seconds: float) -> list[Ended]:
        """Return the ended jobs; waits up to about `seconds` for the first one. Raises: NotTakenError if a queue refuses jobs."""
        ...

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Signal every job to save its state and end; SIGKILL also ends its child processes. Can be repeated."""
        ...

    def close(self) -> None:
        """End what the launcher has started."""
        ...


@dataclass
class Scheduler:
    """Starts the jobs of a source in the slots of a launcher.

    Attributes:
        context: Of every job, apart from its name.
        publisher: Sends the jobs' journals (None: each job has its own, or tracking is off).
        running: By the number of a group's first job.
    """

    sweep: Sweep
    ledger: Ledger
    source: JobSource
    launcher: Launcher
    table: Table
    context: RunContext
    publisher: Publisher | None = None
    waiting: list[PreparedJob] = field(default_factory=list)
    running: dict[int, PreparedJob] = field(default_factory=dict)

    def run(self, stop: Stop, *, grace_seconds: float, max_seconds: float | None = None) -> None:
        """Start jobs as slots get free, and note how they end, until the source has no more or a stop is requested.

        Args:
            stop: What Ctrl-C and SIGTERM have requested.
            grace_seconds: Time of stopped jobs to save their state.
            max_seconds: Stops the sweep after this time (sweep.max_seconds).

        Raises:
            NotTakenError: If a queue refuses jobs.
        """
        deadline: float | None = None  # for stopped jobs
        end = time.monotonic() + (math.inf if max_seconds is None else max_seconds)
        while True:
            is_stopped = stop.signal is not None or time.monotonic() > end
            if not is_stopped:
                self._start()
            elif deadline is None:
                self.launcher.stop()
                deadline = time.monotonic() + grace_seconds
            elif time.monotonic() > deadline:
                self.launcher.stop(signal.SIGKILL)
            if not self.running and (not self.waiting or is_stopped):
                if is_stopped and self._has_more() and stop.signal is None:
                    self.table.say(
                        f"time:   sweep.max_seconds={max_seconds:g} was over before all jobs were at their end"
                    )
                return
            self.table.show(self.sweep)
            if self.publisher is not None and (problem := self.publisher.first_failure()) is not None:
                self.table.say(f"MLflow  {problem}; the jobs continue, and their journals keep everything")
            try:
                ended = self.launcher.ended(LOOK_SECONDS)
            except KeyboardInterrupt:  # the second Ctrl-C
                self.launcher.stop(signal.SIGKILL)
                continue
            except NotTakenError as error:
                self._put_back(*(self.running.pop(number) for number in error.numbers))
                raise
            for each in ended:
                self._note_end(each, is_stopped=is_stopped or stop.signal is not None or each.is_interrupted)

    def _start(self) -> None:
        while True:
            for prepared in list(self.waiting):
                context = replace(in_name_of(self.context, prepared.job), trial=prepared.trial)
                device = self.launcher.start(prepared, context)
                if device is not None:
                    self._note_start(prepared, device)
            fresh = self.source.next(len(self.waiting))
            if fresh is None:
                return
            self.waiting.append(fresh)

    def _note_start(self, prepared: PreparedJob, device: str) -> None:
        self.waiting.remove(prepared)
        self.running[prepared.job.number] = prepared
        for job in prepared.jobs:
            job.state, job.device = "running", device
            if self.publisher is not None:
                self.publisher.follow(self.sweep.folder_of(job))
        self.ledger.note(*prepared.jobs)

    def _put_back(self, *refused: PreparedJob) -> None:
        for prepared in refused:
            for job in prepared.jobs:
                job.state, job.device = "planned", None
            self.ledger.note(*prepared.jobs)

    def _note_end(self, ended: Ended, *, is_stopped: bool) -> None:
        prepared = self.running.pop(ended.number)
        for job in self._without_singles(prepared) if prepared.others else prepared.jobs:
            folder = self.sweep.folder_of(job)
            summary = settle(job, folder, ended.code, is_stopped=is_stopped, cause=ended.cause)
            self.source.ended(job, summary)
            self.ledger.note(job)
            if self.publisher is not None:
                self.publisher.gone(folder)
            self.table.ended(job, summary)

    def _without_singles(self, group: PreparedJob) -> list[Job]:
        """Put the members of a group that can't be trained together back, one by one; return the other jobs."""
        singles, reason = [], None
        for member in (group, *group.others):
            folder = self.sweep.folder_of(member.job)
            summary = Summary.read(folder)
            if summary.status == ALONE:
                singles.append(replace(member, others=()))
                member.job.state, reason = "planned", reason or summary.error
                (folder / FILE).unlink(missing_ok=True)
        if singles:
            self.waiting += singles
            names = f"{singles[0].job.name}{', ...' if len(singles) > 1 else ''}"
            self.table.say(f"batch    {len(singles)} jobs are trained one by one: {reason} ({names})")
        return [job for job in group.jobs if job.number not in {single.job.number for single in singles}]

    def _has_more(self) -> bool:
        """Return whether a stopped sweep has more jobs. A search's next job is written to the ledger here, for sweep.resume."""
        return not all(job.is_done for job in self.sweep.jobs.values()) or self.source.next(0) is not None


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
        return "killed", "SIGKILL: by the system when memory ran out, or by `kill -9`"
    return "killed", f"{name}, from somewhere else"
