"""Shows a sweep's jobs while they run: a live table with a row for each, or lines in a pipe. Called by scheduler.py.

What stands in a row: _picture() and _progress(). The report's rows are made in report/tables.py. It keeps a Watch for
each job, and the last word of those that have ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from runner.experiment.readable_numbers import readable
from runner.experiment.terminal import Terminal
from runner.sweep.jobs.ledger import Job, Sweep
from runner.tasks.metric_names import is_rate
from runner.tracking.journal_records import FILE, Points, scan

MOST_ROWS = 20  # of jobs that have ended; the others are counted
SECONDS_BETWEEN_FRAMES = 0.5
STYLES = {
    "finished": "green",
    "failed": "red",
    "killed": "red",
    "pruned": "yellow",
    "running": "bold",
    "skipped": "dim",
}


class Watch:
    """Follows in a job's journal how far it has got, and its last values; reads only what was added since the last look."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._offset = 0
        self.step = 0
        self.num_steps = 0  # 0: not known yet
        self.values: dict[str, float] = {}

    def look(self) -> None:
        """Takes in what has been written; milliseconds."""
        with suppress(FileNotFoundError, ValueError):  # not there yet, or begun anew
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
        self._watches: dict[tuple[int, str], Watch] = {}
        self._results: dict[int, str] = {}
        self._said: set[int] = set()
        self._drawn = 0.0
        self._total = 0

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
        self.console.print(text, markup=False)

    def show(self, sweep: Sweep) -> None:
        """Draws the jobs as they are now, at most twice a second; in a pipe, a line for each job that began."""
        self._total = len(sweep.jobs)
        if self._live is None:
            for job in sweep.jobs.values():
                if job.state == "running" and job.number not in self._said:
                    self._said.add(job.number)
                    self.say(f"job {job.number} began on {job.device}: {job.name}")
            return
        if time.monotonic() - self._drawn < SECONDS_BETWEEN_FRAMES:
            return
        self._drawn = time.monotonic()
        self._live.update(self._picture(sweep), refresh=True)

    def ended(self, job: Job, summary: Mapping[str, Any]) -> None:
        """A job's end; in a pipe it is a line."""
        best = summary.get("best") or {}
        value = f"{best['metric']} {readable(best['value'])}" if best.get("value") is not None else ""
        self._results[job.number] = value
        if self._live is None:
            what = f": {job.error}" if job.error else ""
            self.say(f"job {job.number} {job.state}{what}  {value}".rstrip())

    def _picture(self, sweep: Sweep) -> Group:
        table = RichTable(box=None, pad_edge=False, header_style="bold")
        for heading in ("job", "", "device", "progress", "last"):
            table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=2 if heading == "last" else None)
        ended = [job for job in sweep.jobs.values() if job.is_done and job.state != "skipped"]
        for job in [*ended[-MOST_ROWS:], *(job for job in sweep.jobs.values() if job.state == "running")]:
            progress, last = self._progress(sweep, job)
            style = STYLES.get(job.state, "")
            table.add_row(str(job.number), job.name, job.device or "", Text(progress, style=style), last)
        counts = Counter(job.state for job in sweep.jobs.values())
        line = ", ".join(f"{count} {state}" for state, count in counts.items())
        return Group(table, Text(f"{len(sweep.jobs)} jobs: {line}", style="dim"))

    def _progress(self, sweep: Sweep, job: Job) -> tuple[str, str]:
        if job.is_done:
            return job.state, job.error or self._results.get(job.number, "")
        watch = self._watches.setdefault((job.number, job.folder_name), Watch(sweep.folder_of(job)))
        watch.look()
        share = f"{100 * watch.step / watch.num_steps:.0f} %" if watch.num_steps else "starting"
        names = sorted(watch.values, key=lambda name: not name.startswith("val/"))
        shown = [name for name in names if name.startswith(("val/", "train/")) and not is_rate(name)][:2]
        return share, "  ".join(f"{name} {readable(watch.values[name])}" for name in shown)
