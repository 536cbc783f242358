"""Trackers next to MLflow, TensorBoard and those of other packages.

Each gets the same journal as MLflow, in a separate process and with a separate acknowledgement, `journal/ack-NAME.json`.
`tracking.trackers` names the entry points `runner.trackers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from runner.config.validate import TRACKERS
from runner.tracking.ack import Ack, UploadProgress
from runner.tracking.journal_records import FILE, Points, Record, has_records, scan, scan_events

TENSORBOARD = "tensorboard"
RECORDS_PER_TURN = 100


class Tracker(Protocol):
    """A copy of one run, made in an uploader process or by `sync`. The class is called without arguments.

    A call that raises is repeated later; neither MLflow nor the training waits. When the process is killed after a call,
    before the acknowledgement is on disk, that call comes a second time.
    """

    def begin(self, folder: Path, start: Mapping[str, Any]) -> None:
        """Begin or resume a run. Also called first by a process that continues to send.

        Args:
            folder: The run directory.
            start: `uid`, `run_name`, `experiment`, `start_ms`, `params`, `tags`.
        """

    def points(self, points: Points) -> None:
        """Store n steps of k values: `names` (k,), `steps` (n,), `times_ms` (n,), `values` (n, k)."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Store an event, e.g., of kind "artifact" with the field `path`, relative to the run directory."""

    def end(self, status: str) -> None:
        """Set the status: FINISHED, FAILED or KILLED."""


def chosen_trackers(tracking: Any) -> list[str]:
    """Return the names of the trackers that `tracking` of a configuration chooses, next to MLflow."""
    return [*map(str, tracking.trackers or ()), *([TENSORBOARD] if tracking.tensorboard else [])]


def trackers_of(folder: Path) -> list[str]:
    """Return the names of the trackers of a run's last start."""
    return [str(name) for name in _last_start(folder).get("trackers") or ()]


class TrackerUploader:
    """Sends one run's journal to one tracker, from the first record on that it has not acknowledged; as Uploader does.

    Args:
        rest: Called after each record with the seconds that it took; may wait.
    """

    def __init__(self, folder: Path, name: str, *, rest: Callable[[float], None] | None = None) -> None:
        self._folder, self._name, self._rest = folder, name, rest
        self._progress = UploadProgress(folder, "the service", tracker=name)
        self._tracker: Tracker | None = None

    @property
    def ack(self) -> Ack:
        return self._progress.ack

    def attempt(self, *, postponed: bool = False, most: int | None = None) -> bool:
        """Send what the journal has, RECORDS_PER_TURN records if `most` is set. Returns False after an error."""
        try:
            for record in islice(scan(self._folder / FILE, self.ack.offset), most and RECORDS_PER_TURN):
                began = time.monotonic()
                self._send(record)
                if self._rest is not None:
                    self._rest(time.monotonic() - began)
        except Exception as error:  # of the other package
            return self._fail(error)
        if self.ack.error:
            self._progress.note(error=None)
        return True

    def has_records(self) -> bool:
        return has_records(self._folder / FILE, self.ack.offset)

    has_more = has_records

    def abandon(self) -> bool:
        """End a run without an end as KILLED. Returns False after an error."""
        if not self.ack.has_begun or self.ack.ended or self.ack.died:
            return True
        try:
            self._open().end("KILLED")
        except Exception as error:  # of the other package
            return self._fail(error)
        self._progress.note(died=True)
        return True

    def only_waits(self) -> bool:
        return False

    only_waits_for_parent = only_waits

    def sample(self, *, sends: bool = True) -> None:
        """Do nothing: only MLflow gets the machine's load."""

    def leave(self) -> None:
        """Do nothing: another process continues the run."""

    def note_outage(self, error: str) -> None:
        """Do nothing: a tracker's attempts are its only requests."""

    def _fail(self, error: Exception) -> bool:
        self._progress.fail(error, what=f"tracker {self._name}")
        return False

    def _send(self, record: Record) -> None:
        tracker, has_ended = self._open(), self.ack.ended
        if isinstance(record.data, Points):
            tracker.points(record.data)
        elif record.kind == "start":
            tracker.begin(self._folder, record.data)
            has_ended = False
        elif record.kind == "end":
            tracker.end(str(record.data["status"]))
            has_ended = True
        else:
            tracker.event(record.kind, record.data)
        written = self.ack.points_written + record.num_points
        self._progress.note(offset=record.end, points_written=written, ended=has_ended, died=False)

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
    if name == TENSORBOARD:
        from runner.tracking.tensorboard import TensorBoard

        return TensorBoard()
    for entry in entry_points(group=TRACKERS, name=name):
        tracker: Tracker = entry.load()()
        return tracker
    raise ModuleNotFoundError("no installed package has it")
