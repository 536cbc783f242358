"""Sends what was measured to the journal, the screen and the run's record, and wakes the publisher.

Made by session.py; all but means() runs in the background thread. It keeps the points that wait for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from runner.experiment.console import Screen
from runner.experiment.run_record import Record
from runner.tracking.journal import Journal, Points, UnsyncedError
from runner.tracking.publisher import Publisher
from runner.training.metric_buffer import Window


class Reporter:
    """Sends what was measured to the journal, the publisher, the screen and the record.

    A run that is taken up again measures some steps anew: what the journal has of them is not written twice.

    All but means() runs in the background thread. What window() and values() take is in the journal after settle().
    """

    def __init__(
        self, record: Record, *, journal: Journal, publisher: Publisher | None, screen: Screen, batch_rows: int
    ) -> None:
        self._record, self._journal, self._publisher, self._screen = record, journal, publisher, screen
        self._batch_rows = batch_rows
        self._sums: dict[str, float] = {}
        self._num_rows = 0
        self._lock = threading.Lock()  # of the sums: means() is asked while windows still come
        self._waiting: list[Points] = []
        self._num_waiting = 0  # of the points that are counted

    def window(self, window: Window) -> None:
        """The training's rows since the last window."""
        new = window.steps > self._record.journaled.get(window.names[0], 0)
        blocks = []
        if new.any():
            values = window.values[new].astype(np.float64)
            blocks.append(Points(window.names, window.steps[new], window.times_ms[new], values))
        steps_per_second = window.num_steps / max(window.seconds, 1e-9)
        last_step, now_ms = int(window.steps[-1]), int(window.times_ms[-1])
        speed = {
            "speed/steps_per_second": steps_per_second,
            "speed/samples_per_second": steps_per_second * self._batch_rows,
        }
        blocks += self._one_row(speed, last_step, now_ms)
        for name, noted in window.notes.items():
            points = [(step, value) for step, value in noted if self._is_new(name, step)]
            if not points:
                continue
            steps, values = np.array([step for step, _ in points]), np.array([[value] for _, value in points])
            blocks.append(Points((name,), steps, np.full(len(points), now_ms), values))
            self._record.metrics[name] = points[-1][1]
        self._waiting += blocks
        self._num_waiting += int(new.sum()) * len(window.names)
        self._record.metrics |= dict(zip(window.names, map(float, window.values[-1]), strict=True)) | speed
        with self._lock:
            for name, total in zip(window.names, window.values.sum(0, dtype=np.float64), strict=True):
                self._sums[name] = self._sums.get(name, 0.0) + float(total)
            self._num_rows += len(window.values)
        self._screen.window(window)

    def values(self, values: Mapping[str, float], *, step: int, time_ms: int) -> None:
        """The values of a whole split, at `step`."""
        self._record.metrics |= values
        blocks = self._one_row(values, step, time_ms)
        self._waiting += blocks
        self._num_waiting += sum(block.values.size for block in blocks)

    def settle(self) -> None:
        """Brings what waits to the disk, at once, and tells the publisher.

        Raises: OSError; it all waits on then, but for what the journal has all the same.
        """
        if not self._waiting:
            return
        try:
            self._journal.blocks(self._waiting)
        except UnsyncedError:
            self._journaled()
            raise
        self._journaled()

    def _journaled(self) -> None:
        self._record.points += self._num_waiting
        self._waiting, self._num_waiting = [], 0
        if self._publisher is not None:
            self._publisher.wake()
            if (problem := self._publisher.first_failure()) is not None:
                self._screen.say(f"tracking: {problem}; the run continues, and its journal keeps everything")

    def means(self) -> dict[str, float]:
        """The means over the training's points since the last call."""
        with self._lock:
            means = {name: total / self._num_rows for name, total in self._sums.items()}
            self._sums, self._num_rows = {}, 0
        return means

    def _one_row(self, values: Mapping[str, float], step: int, time_ms: int) -> list[Points]:
        new = {name: value for name, value in values.items() if self._is_new(name, step)}
        row = np.array([list(new.values())], dtype=np.float64)
        return [Points(tuple(new), np.array([step]), np.array([time_ms]), row)] if new else []

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._record.journaled.get(name, -1)
