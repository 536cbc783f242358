"""journal/ack.json: how far a run has got into MLflow. Whoever sends a journal writes it, whole or not at all; others read it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config import run_files
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import count_points, scan

FILE = "journal/ack.json"  # in a run's folder


@dataclass(frozen=True)
class Ack:
    """What the store has of a journal, and what keeps it from having the rest."""

    offset: int = 0  # where the first record begins that the store has not acknowledged
    points_written: int = 0
    points_pending: int = 0  # in the journal and not in the store; counted by read_ack, not kept
    points_left_out: int = 0  # what tracking.points has left to the journal
    points_rejected: int = 0  # refused for good; journal/rejected.jsonl has them
    points_restored: int = 0  # sent again because the store had lost them
    #: by MLflow's name of a metric: how many different points were sent, and step and time of the last one
    last_points: dict[str, list[int]] = field(default_factory=dict)
    uri: str = ""  # of the store, without a password; a relative sqlite path made absolute
    uid: str = ""  # of the journal's run
    run_id: str | None = None
    experiment_id: str | None = None
    error: str | None = None  # what keeps the rest from the store, None when nothing does
    ended: bool = False  # the run's end has reached the store
    died: bool = False  # the run's process went without an end, and its status says so
    postponed: tuple[dict[str, Any], ...] = ()  # artifacts and models that the store has not taken yet
    thinning: dict[str, Any] = field(default_factory=dict)  # which points are chosen, see thinning.py
    warnings: tuple[str, ...] = ()  # what was left out for good, and why

    @property
    def state(self) -> str:
        """One word: waiting, publishing, failing, ended or died."""
        if self.error:
            return "failing"
        if self.ended or self.died:
            return "ended" if self.ended else "died"
        return "publishing" if self.run_id else "waiting"

    @property
    def counts(self) -> dict[str, int]:
        """As summary.json has them."""
        counts = {"points_written": self.points_written, "points_pending": self.points_pending}
        more = {"points_left_out": self.points_left_out, "files_pending": len(self.postponed)}
        return counts | {name: count for name, count in more.items() if count}

    @property
    def is_complete(self) -> bool:
        """Whether the store has everything there is, and knows how the run ended."""
        return (self.ended or self.died) and not self.points_pending and not self.postponed


def read_ack(folder: Path) -> Ack:
    """The last acknowledgement, its pending points counted anew; a damaged file counts as none: that costs a replay."""
    try:
        fields = run_files.read_json(folder / FILE)
        if fields.pop("sha256") != _digest(fields):
            raise ValueError("it is not what was written")
        fields |= {name: tuple(fields[name]) for name in ("postponed", "warnings")}
        ack = Ack(**{name: value for name, value in fields.items() if name != "state"})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        ack = Ack()
    return dataclasses.replace(ack, points_pending=count_points(folder / JOURNAL, ack.offset))


def end_time_ms(folder: Path, ack: Ack, end_ms: int) -> int:
    """Return `end_ms`, or the time of the run's start or last point if that is later: a clock may go backward."""
    first = next(scan(folder / JOURNAL), None)
    start_ms = first.data.get("start_ms") or 0 if first is not None and isinstance(first.data, dict) else 0
    return max([end_ms, start_ms, *(time_ms for _, _, time_ms in ack.last_points.values())])


def write_ack(folder: Path, ack: Ack) -> None:
    """Not synced: after a power cut an older one costs a replay, no more."""
    fields = {"state": ack.state, **dataclasses.asdict(ack)}
    del fields["points_pending"]
    fields["sha256"] = _digest(fields)
    run_files.write_whole(folder / FILE, json.dumps(fields, indent=1) + "\n")


def _digest(fields: dict[str, Any]) -> str:
    """A changed offset would leave points out without a word."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
