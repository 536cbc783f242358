"""Sends a run's values to its journal and the screen; hooks' images and tables become files.

Made by session.py. Points that can't be written yet wait here.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.config.run_files import write_whole
from runner.experiment.console import Screen
from runner.tasks.metric_names import is_rate
from runner.tracking.journal import Journal, Points, UnsyncedError
from runner.tracking.journal_reader import read_events, read_series
from runner.tracking.publisher import Publisher
from runner.training.hooks import HookValues
from runner.training.metric_buffer import Window
from runner.training.observer import EpochEnd, Observer, Trial

if TYPE_CHECKING:
    from PIL import Image

SPLITS = ("train/", "val/", "test/")
IMAGES, TABLES = "images", "tables"
SMALL = 256  # pixels of the image that MLflow's charts show


class Reporter(Observer):
    """The observer of a training: sends its values to the journal, the publisher and the screen, and keeps the last ones.

    All but means() runs in the background thread. What window() and values() take is in the journal after settle().
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        screen: Screen,
        *,
        publisher: Publisher | None = None,
        trial: Trial | None = None,
        batch_size: int = 1,
    ) -> None:
        """Read what the journal of a resumed run has, 1 s a million points: these points are not written twice."""
        self.folder, self.journal, self.trial = folder, journal, trial
        self._screen, self._publisher, self._batch_size = screen, publisher, batch_size
        starts = [event["uid"] for event in read_events(folder) if event["kind"] == "start"]
        self.uid: str = starts[0] if starts else uuid.uuid4().hex  # of the run, also when it is resumed
        self.metrics: dict[str, float] = {}  # the last value of each
        self.points = 0  # that the journal has
        self._last_steps: dict[str, int] = {}  # by name, the last step that the journal had at the start
        for name, (steps, _, values) in read_series(folder).items() if starts else ():
            self._last_steps[name], self.metrics[name] = int(steps.max()), float(values[-1])
            self.points += len(values) if name.startswith(SPLITS) and not is_rate(name) else 0
        self._sums: dict[str, float] = {}
        self._num_rows = 0
        self._lock = threading.Lock()  # of the sums: means() is called while windows still arrive
        self._waiting: list[Points] = []
        self._num_waiting = 0  # of the points that are counted

    def say(self, text: str) -> None:
        self._screen.say(text)

    def epoch(self, end: EpochEnd) -> None:
        self._screen.epoch(end)

    def progress(self, *, num_steps: int, num_epochs: int) -> AbstractContextManager[None]:
        return self._screen.training(num_steps=num_steps, num_epochs=num_epochs)

    def window(self, window: Window) -> None:
        """The training's rows since the last window."""
        new = window.steps > self._last_steps.get(window.names[0], 0)
        blocks = []
        if new.any():
            values = window.values[new].astype(np.float64)
            blocks.append(Points(window.names, window.steps[new], window.times_ms[new], values))
        steps_per_second = window.num_steps / max(window.seconds, 1e-9)
        last_step, now_ms = int(window.steps[-1]), int(window.times_ms[-1])
        speed = {
            "speed/steps_per_second": steps_per_second,
            "speed/samples_per_second": steps_per_second * self._batch_size,
        }
        blocks += self._one_row(speed, last_step, now_ms)
        for name, noted in window.notes.items():
            points = [(step, value) for step, value in noted if self._is_new(name, step)]
            if not points:
                continue
            steps, values = np.array([step for step, _ in points]), np.array([[value] for _, value in points])
            blocks.append(Points((name,), steps, np.full(len(points), now_ms), values))
            self.metrics[name] = points[-1][1]
        self._waiting += blocks
        self._num_waiting += int(new.sum()) * len(window.names)
        self.metrics |= dict(zip(window.names, map(float, window.values[-1]), strict=True)) | speed
        with self._lock:
            for name, total in zip(window.names, window.values.sum(0, dtype=np.float64), strict=True):
                self._sums[name] = self._sums.get(name, 0.0) + float(total)
            self._num_rows += len(window.values)
        self._screen.window(window)

    def values(self, values: Mapping[str, float], *, step: int, time_ms: int) -> None:
        """The values of a whole split, at `step`."""
        self.metrics |= values
        blocks = self._one_row(values, step, time_ms)
        self._waiting += blocks
        self._num_waiting += sum(block.values.size for block in blocks)

    def settle(self) -> None:
        """Write what waits to the disk at once, and wake the publisher.

        Raises: OSError; it all waits on then, but for what the journal has all the same.
        """
        if not self._waiting:
            return
        try:
            self.journal.blocks(self._waiting)
        except UnsyncedError:
            self._journaled()
            raise
        self._journaled()

    def _journaled(self) -> None:
        self.points += self._num_waiting
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

    def shown(self, shown: HookValues, *, step: int, time_ms: int) -> None:
        """Write a hook's images and tables to files, and have them sent. Raises: OSError."""
        for name, image in shown.images.items():
            for file in _write_image(self.folder / IMAGES, name, image, step=step, time_ms=time_ms):
                self.journal.event("artifact", path=f"{IMAGES}/{file.name}", to=IMAGES)
        tags = {"mlflow.loggedImages": "True"} if shown.images else {}
        for name, rows in shown.tables.items():
            file = _add_rows(self.folder / TABLES / f"{name.replace('/', '~')}.json", rows, step=step)
            self.journal.event("artifact", path=f"{TABLES}/{file.name}", to=TABLES)
        if shown.tables:
            written = [f"{TABLES}/{file.name}" for file in sorted((self.folder / TABLES).glob("*.json"))]
            tags["mlflow.loggedArtifacts"] = json.dumps([{"path": path, "type": "table"} for path in written])
        if tags:
            self.journal.event("tags", tags=tags)
        if self._publisher is not None:
            self._publisher.wake()

    def _one_row(self, values: Mapping[str, float], step: int, time_ms: int) -> list[Points]:
        new = {name: value for name, value in values.items() if self._is_new(name, step)}
        row = np.array([list(new.values())], dtype=np.float64)
        return [Points(tuple(new), np.array([step]), np.array([time_ms]), row)] if new else []

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._last_steps.get(name, -1)


def _write_image(folder: Path, name: str, image: Image.Image, *, step: int, time_ms: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    begin = f"{name.replace('/', '~')}+step+{step}+"
    before = next((file for file in sorted(folder.glob("*.png")) if file.name.startswith(begin)), None)
    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{folder.absolute()}/{begin}")
    path = before or folder / f"{begin}timestamp+{time_ms}+{unique}.png"
    small = image.copy()
    small.thumbnail((SMALL, SMALL))
    preview = path.with_name(f"{path.stem}+compressed.webp")
    image.save(path)
    small.save(preview)
    return [path, preview]


def _add_rows(path: Path, rows: list[dict[str, Any]], *, step: int) -> Path:
    """Write each row with its step, as pandas' orient="split"; rows of this step or later are replaced."""
    before: list[dict[str, Any]] = []
    if path.is_file():
        held = json.loads(path.read_text())
        before = [dict(zip(held["columns"], row, strict=True)) for row in held["data"]]
        before = [row for row in before if row["step"] < step]
    every = before + [{"step": step, **row} for row in rows]
    columns = list(dict.fromkeys(name for row in every for name in row))
    content = {"columns": columns, "data": [[row.get(name) for name in columns] for row in every]}
    write_whole(path, json.dumps(content))
    return path
