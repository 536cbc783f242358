"""A run's points and events as they come, from its journal, which another process or machine may be writing. For `watch`.

It keeps all points, and where in the journal it has read to.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.summary import read_summary
from runner.runs.reproduce.compare import Points
from runner.runs.reproduce.recorded import num_steps_of
from runner.tasks.metric_names import is_rising
from runner.tracking.journal import is_being_written
from runner.tracking.journal_reader import series_of
from runner.tracking.journal_records import FILE, scan
from runner.tracking.journal_records import Points as Rows

#: a run whose lock is not to be seen from here (another machine's disk) is taken for ended when it has been still so long
STILL_SECONDS = 600.0
SECONDS_BETWEEN_LOOKS = 2.0  # at the lock
STATES = {"FINISHED": "finished", "KILLED": "killed", "FAILED": "failed"}


@dataclass(frozen=True)
class Goal:
    """What a run is judged by."""

    metric: str
    is_rising: bool


class Live:
    """A run. read() takes in what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start: Mapping[str, Any] = {}
        self._parts: dict[str, list[Points]] = {}
        self._offset, self._ended, self._was_held, self._looked = 0, "", False, -np.inf

    def read(self) -> bool:
        """Whether there is anything new. A million points take 0.1 s."""
        path, rows, before = self.folder / FILE, [], self._offset
        if not path.is_file():
            return False
        if path.stat().st_size < self._offset:  # another journal
            self.__init__(self.folder)  # type: ignore[misc]
        for record in scan(path, self._offset):
            self._offset = record.end
            if isinstance(record.data, Rows):
                rows.append(record.data)
            elif record.kind == "start":
                self.start, self._ended = record.data, ""
            elif record.kind == "end":
                self._ended = STATES.get(str(record.data["status"]), "finished")
        for name, (steps, _, values) in series_of(rows).items():
            self._parts.setdefault(name, []).append((steps, values))
        return self._offset != before

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def points(self, name: str) -> Points:
        """Of one metric, in the order of writing; none for one that is not there."""
        parts = self._parts.get(name)
        if parts is None:
            return np.array([], np.int64), np.array([], np.float64)
        if len(parts) > 1:
            parts[:] = [(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))]
        return parts[0]

    def last(self, name: str) -> float | None:
        """Its last value."""
        steps, values = self.points(name)
        return float(values[-1]) if len(steps) else None

    def best(self, name: str) -> tuple[float, int] | None:
        """Its best value so far, and the step."""
        steps, values = self.points(name)
        sign = 1.0 if (is_rising(name) if name != self.goal.metric else self.goal.is_rising) else -1.0
        if not np.isfinite(values).any():
            return None
        place = int(np.where(np.isfinite(values), sign * values, -np.inf).argmax())
        return float(values[place]), int(steps[place])

    @property
    def status(self) -> str:
        """running, or how it ended: finished, failed, killed, pruned."""
        now = time.monotonic()
        if self._ended:
            return str(read_summary(self.folder).get("status") or self._ended)
        if now - self._looked > SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if is_being_written(self.folder):
                self._was_held = True
            elif self._was_held or time.time() - self._changed > STILL_SECONDS:
                self._ended = "killed"
        return self._ended or "running"

    @property
    def step(self) -> int:
        """The last one of which anything is known."""
        return max((int(self._parts[name][-1][0][-1]) for name in self._parts), default=0)

    @property
    def num_steps(self) -> int | None:
        """That it is to have; None where it does not say."""
        return num_steps_of(self._params)

    @property
    def goal(self) -> Goal:
        said = self._params.get("train.early_stopping.metric", "null")
        metric = said if said not in ("null", "None", "") else "val/loss"
        mode = self._params.get("train.early_stopping.mode")
        return Goal(metric, mode == "max" if mode in ("min", "max") else is_rising(metric))

    @property
    def _params(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.start.get("params", {})
        return found

    @property
    def _changed(self) -> float:
        file = self.folder / FILE
        return file.stat().st_mtime if file.is_file() else 0.0


@dataclass(frozen=True)
class Thinned:
    """A curve in columns of equal width: the least, the greatest and the mean of each; NaN where nothing finite is."""

    least: NDArray[np.float64]  # (n,)
    greatest: NDArray[np.float64]  # (n,)
    mean: NDArray[np.float64]  # (n,)


def thin(points: Points, columns: int, *, first: int, last: int) -> Thinned:
    """The curve from the step `first` to `last`, in so many columns, so that a spike of one step still shows.

    Of a run that went on from before, a step has the value that it had last.
    """
    steps, values = points
    kept = np.isfinite(values)
    steps, values = (steps, values) if kept.all() else (steps[kept], values[kept])
    if len(steps) and (np.diff(steps) < 0).any():  # it was stopped and went on from before
        steps, latest = np.unique(steps[::-1], return_index=True)
        values = values[::-1][latest]
    begin, end = np.searchsorted(steps, (first, last + 1))
    steps, values = steps[begin:end], values[begin:end]
    column = ((steps - first) * columns) // (last - first + 1)
    begins = np.searchsorted(column, np.arange(columns))
    is_there = np.diff(begins, append=len(steps)) > 0
    found = [np.full(columns, np.nan) for _ in range(3)]
    if is_there.any():
        filled = begins[is_there]
        found[0][is_there] = np.minimum.reduceat(values, filled)
        found[1][is_there] = np.maximum.reduceat(values, filled)
        found[2][is_there] = np.add.reduceat(values, filled) / np.diff(filled, append=len(steps))
    return Thinned(*found)
