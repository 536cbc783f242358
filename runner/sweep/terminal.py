"""Shows a sweep in the terminal: what it will run, its jobs while they run, and at its end how to continue.

While jobs run, it is a live table, or lines in a pipe. The table at the end is in report/tables.py.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from runner.config.identity import as_read, key_of
from runner.config.secrets import HIDDEN
from runner.errors import without_password
from runner.experiment.provenance import TRIES
from runner.experiment.summary import Summary
from runner.experiment.terminal import Terminal, labeled, readable, row, short
from runner.sweep.jobs.ledger import DEFAULTS, ENDS, Job, Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.mlflow_parent import acks
from runner.tracking import stores
from runner.tracking.journal_records import FILE, Points, scan

MAX_LINES = 24  # of jobs that will run
MAX_ROWS = 20  # of jobs that have ended
MAX_ERROR = 40  # characters
SECONDS_BETWEEN_FRAMES = 0.5
COLORS = {"finished": "green", "failed": "red", "killed": "red", "pruned": "yellow"}


class Watch:
    """Follows a job's progress and last values in its journal; reads only what was added since the last look."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._offset = 0
        self.step = 0
        self.num_steps = 0  # 0: not known yet
        self.values: dict[str, float] = {}

    def look(self) -> None:
        with suppress(FileNotFoundError, ValueError):  # not written yet, or started again
            for record in scan(self._path, self._offset):
                self._offset = record.end
                if isinstance(record.data, Points):
                    if record.data.names[0].startswith("train/"):
                        self.step = max(self.step, int(record.data.steps[-1]))
                    self.values.update(zip(record.data.names, map(float, record.data.values[-1]), strict=True))
                elif record.kind == "start":
                    self.num_steps = int(record.data["params"].get("facts.num_steps", 0))


class Table:
    """The terminal of a sweep."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Terminal()
        self._live: Live | None = None
        self._started: set[int] = set()  # numbers of jobs
        self._watches: dict[tuple[int, str], Watch] = {}  # by number and directory
        self._metrics: dict[
            int, Mapping[str, float]
        ] = {}  # by number; of the jobs that have ended, the last one is at the end
        self._drawn = 0.0

    def __enter__(self) -> Table:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live table; lines are printed below from here on."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        self.console.print(labeled(text))

    def show(self, sweep: Sweep) -> None:
        """Draw the jobs, at most twice a second; in a pipe, print a line for each job that has started."""
        for job in sweep.jobs.values():
            if job.state == "planned":  # again, when its group was split
                self._started.discard(job.number)
            elif job.state == "running" and job.number not in self._started:
                self._started.add(job.number)
                if self._live is None:
                    self.say(f"job {job.number} started on {job.device}: {job.name or DEFAULTS}")
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= SECONDS_BETWEEN_FRAMES:
            self._drawn = now
            self._live.update(self._frame(sweep), refresh=True)

    def ended(self, job: Job, summary: Summary) -> None:
        """Take how a job ended; in a pipe, print it."""
        best = summary.best
        known = {} if best.get("value") is None else {str(best["metric"]): float(best["value"])}
        self._metrics.pop(job.number, None)
        self._metrics[job.number] = {**summary.metrics, **known}
        if self._live is None:
            error = f": {job.error}" if job.error else ""
            value = "".join(f"  {name} {readable(value)}" for name, value in known.items())
            self.say(f"job {job.number} {job.state}{error}{value}")

    def _frame(self, sweep: Sweep) -> Group:
        running = [job for job in sweep.jobs.values() if job.state == "running"]
        for job in running:
            watch = self._watches.setdefault((job.number, job.folder_name), Watch(sweep.folder_of(job)))
            watch.look()
            self._metrics[job.number] = watch.values
        names = {name for values in self._metrics.values() for name in values}
        metric = "train/loss" if "train/loss" in names and "val/loss" not in names else "val/loss"
        if sweep.objectives:
            metric = sweep.objectives[0]["metric"]
        table = RichTable(box=None, pad_edge=False, header_style="bold")
        for heading in ("#", "overrides", "device", "progress", metric):
            is_number = heading in ("#", metric)
            table.add_column(Text(heading), no_wrap=heading != "overrides", justify="right" if is_number else "left")
        ended = [job for number in reversed(self._metrics) if (job := sweep.jobs[number]).is_done]
        num_rows = max(1, min(MAX_ROWS, self.console.height - 4 - len(running)))
        for job in (*running, *ended[:num_rows]):
            name = Text(job.name or DEFAULTS, no_wrap=True, overflow="ellipsis")
            value = self._metrics[job.number].get(metric)
            cells = (name, job.device or "", self._progress(job), "" if value is None else readable(value))
            table.add_row(str(job.number), *cells)
        counts = Counter(job.state for job in sweep.jobs.values())
        num_done = sum(counts[state] for state in ENDS) - counts["skipped"]
        total = "" if sweep.objectives else f"/{len(sweep.jobs) - counts['skipped']}"
        others = [f"{counts[state]} {state}" for state in ("failed", "killed", "pruned", "skipped") if counts[state]]
        return Group(table, Text(" · ".join([f"{num_done}{total} done", *others]), style="dim"))

    def _progress(self, job: Job) -> Text:
        if job.is_done:
            text = f"{job.state}: {job.error}" if job.error else job.state
            return Text(text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR - 1]}…", COLORS.get(job.state, ""))
        watch = self._watches[job.number, job.folder_name]
        return Text(f"{min(1.0, watch.step / watch.num_steps):.0%}" if watch.num_steps else "starting", "green")


def kind(objectives: Sequence[Mapping[str, str]]) -> str:
    """Return the kind of a sweep, for messages."""
    goals = [f"{objective['direction']} {objective['metric']}" for objective in objectives]
    return f"a search ({', '.join(goals)})" if goals else "a grid"


def plan(
    table: Table, sweep: Sweep, prepared: Sequence[PreparedJob], *, slots: str, search: Sequence[tuple[str, str]]
) -> None:
    """Print the slots and the jobs before the first one starts, and the skipped ones with the reason.

    search: the lines of a search, by label; empty for a grid.
    """
    to_run = [each.job for each in prepared if each.missing is None]
    skipped = [(each.job, each.missing) for each in prepared if each.missing is not None]
    table.say(row("sweep", short(sweep.folder)))
    table.say(row("slots", slots))
    if search:
        states = Counter(job.state for job in sweep.jobs.values())
        before = ", ".join(f"{count} {state}" for state, count in states.items())
        for heading, text in [*search, *([("before", before)] if before else [])]:
            table.say(row(heading, text))
        return
    done = sum(job.is_done for job in sweep.jobs.values()) - len(skipped)
    optional = [f"{count} {word}" for count, word in ((len(skipped), "skipped"), (done, "done before")) if count > 0]
    table.say(row("jobs", ", ".join([f"{len(to_run)} to run", *optional])))
    for job in to_run[:MAX_LINES]:
        again = " (resumed)" if sweep.folder_of(job).exists() else ""
        table.say(f"  {job.folder_name:<6} {job.name or DEFAULTS}{again}")
    if len(to_run) > MAX_LINES:
        table.say(f"  ... and {len(to_run) - MAX_LINES} more")
    described = {each.job.number for each in prepared}
    if left := sum(not job.is_done and job.number not in described for job in sweep.jobs.values()):
        began = shlex.join(map(without_password, sweep.overrides))
        jobs = "1 unfinished job is" if left == 1 else f"{left} unfinished jobs are"
        table.say(f"note: {jobs} not covered by these overrides; the sweep was started with {began}")
    reasons: dict[str, list[str]] = {}
    for job, missing in skipped:
        reasons.setdefault(f"{missing.source}: {missing.message}", []).append(job.name)
    for reason, names in reasons.items():
        table.say(row("skipped", reason))
        for name in names:
            table.say(f"  {name or DEFAULTS}")


def to_resume(folder: str) -> str:
    """Return the override that resumes the sweep in a directory, quoted for the shell and for Hydra."""
    return shlex.quote("sweep.resume=" + as_read(folder, '"'))


def resume_command(folder: str, *more: str) -> str:
    """Return the whole command that resumes a sweep: this one's arguments without passwords, and sweep.resume."""
    replaced = ("sweep.resume", "sweep.retry", *map(key_of, more))
    words = [HIDDEN.sub("PASSWORD", without_password(word)) for word in sys.argv[1:] if key_of(word) not in replaced]
    return " ".join(["python -m runner", *map(shlex.quote, words), to_resume(folder), *more])


def what_next(table: Table, sweep: Sweep, config: DictConfig) -> None:
    """Print what MLflow has of the sweep, why it lacks the rest, and the command that continues the sweep."""
    states = [job.state for job in sweep.jobs.values()]
    folder = short(sweep.folder)
    if config.tracking.enabled:
        uri, every = str(config.tracking.uri), acks(sweep)
        left = [ack for ack in every if not ack.is_complete]
        shown, named = without_password(uri), stores.words_for(uri)
        if left:
            reason = next((f": {ack.error}" for ack in left if ack.error), "")
            table.say(row("mlflow", f"{shown}  ({len(left)} of {len(every)} runs are incomplete{reason})"))
            table.say(row("sync", f"python -m runner sync {shlex.quote(folder)} {named}".rstrip()))
        else:
            table.say(row("mlflow", f"{shown}  (view: {f'python -m runner ui {named}'.rstrip()})"))
    if Path(folder).is_relative_to(TRIES):  # a try is not resumed
        return
    if any(state in ("planned", "running", "interrupted") for state in states):
        table.say(row("resume", resume_command(folder)))
    elif any(state in ("failed", "killed") for state in states):
        table.say(row("retry", resume_command(folder, "sweep.retry=true")))
    elif sweep.objectives:
        table.say(row("more", resume_command(folder, f"hydra.sweeper.n_trials={2 * len(states)}")))
