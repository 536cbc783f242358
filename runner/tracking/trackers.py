"""Trackers of other packages: each gets the same journal as MLflow, and has its own acknowledgement.

`tracking.trackers` names the entry points. A tracker's acknowledgement is `journal/ack-NAME.json`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from runner.config.validate import TRACKERS
from runner.tracking.ack import Ack, UploadProgress
from runner.tracking.backoff import Backoff
from runner.tracking.journal_records import FILE, Record, has_records, scan, scan_events


class Tracker(Protocol):
    """A copy of one run, made in the uploader process or by `sync`. The class is called without arguments.

    A record stays in the journal until its call returns. A call that raises is repeated later; MLflow and the training
    continue. When the process is killed after a call, before the acknowledgement is on disk, the record comes a second
    time: `record.offset` identifies it.
    """

    def begin(self, folder: Path, start: Mapping[str, Any]) -> None:
        """Begin or resume a run. Also called first by a process that continues to send.

        Args:
            folder: The run directory.
            start: `uid`, `run_name`, `experiment`, `start_ms`, `params`, `tags`.
        """

    def send(self, record: Record) -> None:
        """Store what a run has written: rows of points (`record.data` is a Points), or an event, its fields by `record.kind`."""

    def end(self, status: str) -> None:
        """Set the status: FINISHED, FAILED or KILLED."""


def trackers_of(folder: Path) -> list[TrackerCopy]:
    """Return the copies of a run, for the trackers of its last start."""
    return [TrackerCopy(folder, str(name)) for name in _last_start(folder).get("trackers") or ()]


class TrackerCopy:
    """Sends one run's journal to one tracker, from the first record on that it has not acknowledged."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._progress = UploadProgress(folder, f"tracker:{name}", file=f"journal/ack-{quote(name, safe='')}.json")
        self._tracker: Tracker | None = None
        self._backoff, self._due_at = Backoff(), 0.0

    @property
    def ack(self) -> Ack:
        return self._progress.ack

    def send(self, *, is_over: bool = False) -> bool:
        """Send what the journal has. Returns False after an error, which is in `ack.error`.

        is_over: Whether a run without an end was killed.
        """
        if time.monotonic() < self._due_at:
            return False
        try:
            for record in scan(self._folder / FILE, self.ack.offset):
                self._send(record)
            if is_over and self.ack.offset and not (self.ack.ended or self.ack.died):
                self._open().end("KILLED")
                self._progress.note(died=True)
        except Exception as error:  # the other package's own code
            self._progress.fail(error, what=f"tracker {self._name}")
            self._due_at = time.monotonic() + self._backoff.pause_seconds()
            return False
        self._backoff.reset()
        if self.ack.error:
            self._progress.note(error=None)
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the tracker has everything, and the run's end."""
        ack, path = self._progress.ack, self._folder / FILE
        return (ack.ended or ack.died) and not has_records(path, ack.offset)

    def _send(self, record: Record) -> None:
        tracker, fields, has_ended = self._open(), record.data, self.ack.ended
        if record.kind == "start" and isinstance(fields, dict):
            tracker.begin(self._folder, fields)
            has_ended = False
        elif record.kind == "end" and isinstance(fields, dict):
            tracker.end(str(fields["status"]))
            has_ended = True
        else:
            tracker.send(record)
        self._progress.note(offset=record.end, ended=has_ended, died=False)

    def _open(self) -> Tracker:
        if self._tracker is None:
            tracker = _load(self._name)
            if start := _last_start(self._folder, end=self.ack.offset):
                tracker.begin(self._folder, start)
            self._tracker = tracker
        return self._tracker


def _last_start(folder: Path, *, end: int | None = None) -> dict[str, Any]:
    """Return the last event `start` before `end`, or {}."""
    start: dict[str, Any] = {}
    for event in scan_events(folder / FILE, end=end):
        start = event if event["kind"] == "start" else start
    return start


def _load(name: str) -> Tracker:
    for entry in entry_points(group=TRACKERS, name=name):
        tracker: Tracker = entry.load()()
        return tracker
    raise ModuleNotFoundError("no installed package has it")
