"""The points and events of a run in progress, from its journal, which another process or machine may be writing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.experiment.summary import Summary
from runner.runs.reproduce.compare import Points
from runner.runs.reproduce.recorded import num_steps_of
from runner.sweep.report.results import Goal
from runner.tasks.metric_names import is_rising
from runner.tracking.journal import is_being_written
from runner.tracking.journal_reader import series_of
from runner.tracking.journal_records import FILE, scan
from runner.tracking.journal_records import Points as Rows

#: a run whose lock can't be seen from here (another machine's disk) has ended after such a pause
STILL_SECONDS = 600.0
SECONDS_BETWEEN_LOOKS = 2.0  # at the lock
STATES = {"FINISHED": "finished", "KILLED": "killed", "FAILED": "failed"}


class LiveRun:
    """A run in progress: all points up to the last call of `read`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start: Mapping[str, Any] = {}
        self._parts: dict[str, list[Points]] = {}
        self._offset, self._ended, self._was_held, self._looked = 0, "", False, -np.inf

    def read(self) -> bool:
        """Read what was written since the last call. Returns whether anything was."""
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
        """Return a metric's points in the order of writing; none for an unknown metric."""
        parts = self._parts.get(name)
        if parts is None:
            return np.array([], np.int64), np.array([], np.float64)
        if len(parts) > 1:
            parts[:] = [(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))]
        return parts[0]

    def last(self, name: str) -> float | None:
        steps, values = self.points(name)
        return float(values[-1]) if len(steps) else None

    def best(self, name: str) -> tuple[float, int] | None:
        """Return a metric's best value so far, and its step."""
        steps, values = self.points(name)
        is_max = is_rising(name) if name != self.goal.metric else self.goal.mode == "max"
        sign = 1.0 if is_max else -1.0
        if not np.isfinite(values).any():
            return None
        place = int(np.where(np.isfinite(values), sign * values, -np.inf).argmax())
        return float(values[place]), int(steps[place])

    @property
    def status(self) -> str:
        """`running`, `finished`, `failed`, `killed` or `pruned`."""
        now, file = time.monotonic(), self.folder / FILE
        if self._ended:
            return Summary.read(self.folder).status or self._ended
        if now - self._looked > SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if is_being_written(self.folder):
                self._was_held = True
            elif self._was_held or not file.is_file() or time.time() - file.stat().st_mtime > STILL_SECONDS:
                self._ended = "killed"
        return self._ended or "running"

    @property
    def step(self) -> int:
        """The last step with a point."""
        return max((int(self._parts[name][-1][0][-1]) for name in self._parts), default=0)

    @property
    def num_steps(self) -> int | None:
        """The number of steps that the run is to have, if it is known."""
        return num_steps_of(self._params)

    @property
    def goal(self) -> Goal:
        metric = self._params.get("train.early_stopping.metric", "null")
        metric = metric if metric not in ("null", "None", "") else "val/loss"
        mode = self._params.get("train.early_stopping.mode", "")
        return Goal(metric, mode if mode in ("min", "max") else "max" if is_rising(metric) else "min")

    @property
    def _params(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.start.get("params", {})
        return found


@dataclass(frozen=True)
class Thinned:
    """A curve in columns of equal width: the first step, the least, greatest and mean value of each; NaN without a finite one."""

    steps: NDArray[np.int64]  # (n,)
    least: NDArray[np.float64]  # (n,)
    greatest: NDArray[np.float64]  # (n,)
    mean: NDArray[np.float64]  # (n,)


def thin(points: Points, columns: int, *, first: int, last: int) -> Thinned:
    """Return the curve from the step `first` to `last` in a number of columns. The spike of a single step stays visible.

    In a run that was resumed from an earlier step, a step has its latest value.
    """
    steps, values = points
    is_finite = np.isfinite(values)
    steps, values = steps[is_finite], values[is_finite]
    if (np.diff(steps) < 0).any():
        steps, latest = np.unique(steps[::-1], return_index=True)
        values = values[::-1][latest]
    begin, end = np.searchsorted(steps, (first, last + 1))
    steps, values = steps[begin:end], values[begin:end]
    column = ((steps - first) * columns) // (last - first + 1)
    filled, begins = np.unique(column, return_index=True)
    found = Thinned(np.zeros(columns, np.int64), *(np.full(columns, np.nan) for _ in range(3)))
    if len(filled):
        found.steps[filled] = steps[begins]
        found.least[filled] = np.minimum.reduceat(values, begins)
        found.greatest[filled] = np.maximum.reduceat(values, begins)
        found.mean[filled] = np.add.reduceat(values, begins) / np.diff(begins, append=len(steps))
    return found
