"""journal/ack.json: how much of a journal MLflow has; journal/ack-NAME.json: how much another tracker has.

The process that sends the journal writes the file atomically.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner.config import run_files
from runner.tracking import store_uri
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import begins_record, count_points, scan, scan_events
from runner.tracking.mlflow_store import explain

FILE = "journal/ack.json"  # in a run's folder, MLflow's
REJECTED = "journal/rejected.jsonl"

log = logging.getLogger("runner.tracking")


@dataclass(frozen=True)
class Ack:
    """How much of a journal the store has, and what prevents it from having the rest."""

    offset: int = 0  # of the first record that the store has not acknowledged
    points_written: int = 0
    points_pending: int = 0  # in the journal and not in the store; counted by read_ack, not stored
    points_left_out: int = 0  # because of tracking.points
    points_rejected: int = 0  # refused by the store; journal/rejected.jsonl has them
    points_restored: int = 0  # sent again because the store had lost them
    #: by MLflow's name of a metric: the number of different points sent, and step and time of the last one
    last_points: dict[str, list[int]] = field(default_factory=dict)
    uri: str = ""  # of the store, without a password; a relative sqlite path made absolute
    uid: str = ""  # of the journal's run
    run_id: str | None = None
    experiment_id: str | None = None
    error: str | None = None  # why the rest was not sent
    ended: bool = False  # the store has the run's end
    died: bool = False  # the run's process was killed, and the store has that status
    postponed: tuple[
        dict[str, Any], ...
    ] = ()  # artifacts and models to send, and a parent that is not in the store yet
    thinning: dict[str, Any] = field(default_factory=dict)  # state of thinning.py
    warnings: tuple[str, ...] = ()  # what was left out, and why

    @property
    def state(self) -> str:
        """One word: waiting, publishing, failing, ended or died."""
        if self.error:
            return "failing"
        if self.ended or self.died:
            return "ended" if self.ended else "died"
        return "publishing" if self.run_id else "waiting"

    @property
    def has_begun(self) -> bool:
        """Whether the store has the run."""
        return self.run_id is not None or self.offset > 0

    @property
    def counts(self) -> dict[str, int]:
        """The counts in summary.json."""
        counts = {"points_written": self.points_written, "points_pending": self.points_pending}
        more = {"points_left_out": self.points_left_out, "files_pending": len(self.postponed)}
        return counts | {name: count for name, count in more.items() if count}

    @property
    def is_complete(self) -> bool:
        """Whether the store has everything, and the run's end."""
        return (self.ended or self.died) and not self.points_pending and not self.postponed


def named_for(file: str, tracker: str) -> str:
    """Return the name of a tracker's own file, e.g., journal/ack-NAME.json; the file itself for MLflow, whose name is ""."""
    stem, dot, ending = file.rpartition(".")
    return f"{stem}-{quote(tracker, safe='')}{dot}{ending}" if tracker else file


def read_ack(folder: Path, tracker: str = "") -> Ack:
    """Return the last acknowledgement, with its pending points; an empty one for a damaged file, which costs a replay."""
    try:
        fields = run_files.read_json(folder / named_for(FILE, tracker))
        if fields.pop("sha256") != _digest(fields):
            raise ValueError("the checksum differs")
        fields |= {name: tuple(fields[name]) for name in ("postponed", "warnings")}
        ack = Ack(**{name: value for name, value in fields.items() if name != "state"})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        ack = Ack()
    return dataclasses.replace(ack, points_pending=count_points(folder / JOURNAL, ack.offset))


def read_error(folder: Path, tracker: str = "") -> str | None:
    """Return the error in the last acknowledgement, without reading the journal."""
    try:
        error = run_files.read_json(folder / named_for(FILE, tracker))["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if error is None else str(error)


def start_time_ms(folder: Path) -> int:
    """Return the time of the run's first start, which a resumed run continues; 0 if the journal lost it."""
    first = next(scan(folder / JOURNAL), None)
    return first.data.get("start_ms") or 0 if first is not None and isinstance(first.data, dict) else 0


def end_time_ms(folder: Path, ack: Ack, end_ms: int) -> int:
    """Return `end_ms`, or the time of the run's start or last point if that is later: a clock may go backward."""
    return max([end_ms, start_time_ms(folder), *(time_ms for _, _, time_ms in ack.last_points.values())])


def write_ack(folder: Path, ack: Ack, tracker: str = "") -> None:
    """Write it atomically, without fsync: an older one after a power cut only costs a replay."""
    fields = {"state": ack.state, **dataclasses.asdict(ack)}
    del fields["points_pending"]
    fields["sha256"] = _digest(fields)
    run_files.write_whole(folder / named_for(FILE, tracker), json.dumps(fields, indent=1) + "\n")


def _digest(fields: dict[str, Any]) -> str:
    """Protects the offset: a damaged one would skip points."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class UploadProgress:
    """The Ack of one run and one store, written to disk after each change.

    An Ack of another store or another journal is discarded.
    """

    def __init__(self, folder: Path, uri: str, *, tracker: str = "") -> None:
        self._folder, self._uri, self._tracker, self._mask = folder, uri, tracker, store_uri.masker(uri)
        self.ack = dataclasses.replace(read_ack(folder, tracker), points_pending=0)
        if self.ack.uri != store_uri.shown(uri) or not begins_record(folder / JOURNAL, self.ack.offset):
            self.ack = Ack(uri=store_uri.shown(uri))

    def note(self, **changes: Any) -> None:
        """Change fields of the Ack and write it."""
        self.ack = dataclasses.replace(self.ack, **changes)
        write_ack(self._folder, self.ack, self._tracker)

    def begin_again(self, *, is_same_run: bool = False) -> None:
        """Forget what the store acknowledged: it has lost the run, or points of the same run."""
        (self._folder / REJECTED).unlink(missing_ok=True)
        kept = ("run_id", "experiment_id", "uid", "points_restored") if is_same_run else ()
        self.ack = Ack(uri=self.ack.uri, **{name: getattr(self.ack, name) for name in kept})
        self.note()

    def warn(self, text: str) -> None:
        """Log and store that something was left out."""
        text = self._mask(text)
        log.warning(text)
        if text not in self.ack.warnings:
            self.note(warnings=(*self.ack.warnings, text))

    def fail(self, error: Exception, *, what: str = "") -> None:
        """Log and store an error after which sending is tried again."""
        experiment = None
        with contextlib.suppress(ValueError, OSError):
            experiment = next(scan_events(self._folder / JOURNAL), {}).get("experiment")
        text = explain(error, uri=self._uri, experiment=experiment)
        text = f"{what}: {text}" if what else text
        if text != self.ack.error:  # one traceback per outage
            log.warning("%s", text)
            log.info("traceback of this error", exc_info=error)  # not shown by `sync`
            self.note(error=text)

    def reject(self, kind: str, refused: Iterable[tuple[Any, str]]) -> None:
        """Append what the store refuses to rejected.jsonl."""
        for item, why in refused:
            fields = {key: getattr(item, key) for key in ("key", "value", "step", "timestamp") if hasattr(item, key)}
            with (self._folder / REJECTED).open("a") as file:
                file.write(json.dumps({"kind": kind, **fields, "why": self._mask(why)}) + "\n")
