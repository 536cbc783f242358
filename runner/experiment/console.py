"""Shows a run to a person: a bar or lines, an epoch's values, the table at the end; the same in runner.log.

For session.py; a window of steps comes in the background thread. It keeps the last values and the speed, for the next frame.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from runner.config.settings import Settings
from runner.config.validate import without_password
from runner.data.balance import balance
from runner.device.backends import about_precision
from runner.device.capabilities import slow_layers
from runner.experiment.claim import CONSOLE, LOG
from runner.experiment.readable_numbers import readable
from runner.experiment.terminal import Terminal, short
from runner.experiment.time_spent import in_words
from runner.tasks.metric_names import is_rate
from runner.tracking import stores
from runner.training.metric_buffer import Window
from runner.training.parts import Parts

log = logging.getLogger("runner")
FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # Hydra's

#: the bar is drawn by whoever brings news, at most this often: a drawing thread of its own would take the lock from training
SECONDS_BETWEEN_FRAMES = 0.25
SECONDS_BETWEEN_LINES = 2.0


class Screen:
    """The terminal of one run: a bar where there is one, plain lines where there is none."""

    def __init__(self, console: Console | None = None, *, log: logging.Logger = log) -> None:
        self.console, self._log = console or Terminal(), log
        self._bar: Progress | None = None
        self._num_epochs = 0
        self._epoch = 0
        self._drawn = 0.0
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()  # the background thread adds to them while the epoch's end shows them
        self._speed = 0.0

    @classmethod
    @contextmanager
    def into(cls, folder: Path) -> Iterator[Screen]:
        """Of one of several runs in a process: everything goes to its folder's console.log and runner.log."""
        handler = logging.FileHandler(folder / LOG)
        handler.setFormatter(logging.Formatter(FORMAT))
        own = logging.Logger("runner", logging.INFO)
        own.addHandler(handler)
        with (folder / CONSOLE).open("a", buffering=1, encoding="utf-8") as file, closing(handler):
            yield cls(Terminal(file=file), log=own)

    def say(self, text: str) -> None:
        """One line, on the screen and in the log."""
        self._log.info(text)
        self.console.print(text, markup=False)

    @contextmanager
    def with_warnings(self) -> Iterator[None]:
        """While it lasts, what is warned of goes to the screen too: whoever reads data or builds a model has no other way."""
        handler = _OnTheScreen(self.console)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    @contextmanager
    def training(self, *, num_steps: int, num_epochs: int) -> Iterator[None]:
        """Shows the progress of a training while it lasts."""
        self._num_epochs = num_epochs
        if not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, auto_refresh=False, transient=True, expand=True) as self._bar:
            self._bar.add_task(f"epoch 1/{num_epochs}", total=num_steps, news="")
            yield
        self._bar = None

    def window(self, window: Window) -> None:
        """News from the device; called by the background thread."""
        self._speed = window.num_steps / max(window.seconds, 1e-9)
        with self._lock:
            self._values.update(zip(window.names, map(float, window.values[-1]), strict=True))
        if self._bar is not None and time.monotonic() - self._drawn > SECONDS_BETWEEN_FRAMES:
            self._draw(int(window.steps[-1]))

    def epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """The values at an epoch's end."""
        self._epoch = epoch
        with self._lock:
            self._values.update(values)
        text = f"epoch {epoch}/{self._num_epochs}  step {step}  {self._shown()}"
        self._log.info(text)
        is_last = epoch == self._num_epochs
        if self._bar is not None:
            if time.monotonic() - self._drawn > SECONDS_BETWEEN_FRAMES or is_last:
                self._draw(step)
        elif time.monotonic() - self._drawn > SECONDS_BETWEEN_LINES or is_last:
            self._drawn = time.monotonic()
            self.console.print(text, markup=False)

    def result(self, summary: Mapping[str, Any], *, folder: str, next_lines: Mapping[str, str]) -> None:
        """The table at the end: values by split, then where everything lies and what to type next."""
        splits: dict[str, dict[str, float]] = {}
        for name, value in summary["metrics"].items():
            split, _, metric = name.partition("/")
            if split in ("train", "val", "test") and not is_rate(name):
                splits.setdefault(metric, {})[split] = value
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        columns = [split for split in ("train", "val", "test") if any(split in row for row in splits.values())]
        for split in columns:
            table.add_column(split, justify="right")
        for metric, row in splits.items():
            table.add_row(metric, *(readable(row[split]) if split in row else "" for split in columns))
        if columns:
            self.console.print(table)
        for name, text in {**_facts(summary), "folder": folder, **next_lines}.items():
            self.console.print(f"{name:<8}{text}", markup=False)

    def end_now(self, text: str) -> None:
        """The last word of a process that ends at once: the cursor that the bar hid is there again."""
        self.console.show_cursor()
        self.say(text)

    def _shown(self) -> str:
        with self._lock:
            return "  ".join(f"{name} {readable(value)}" for name, value in self._values.items())

    def _draw(self, step: int) -> None:
        assert self._bar is not None
        self._drawn = time.monotonic()
        news = f"{self._speed:,.0f} steps/s  {self._shown()}"
        epoch = min(self._epoch + 1, self._num_epochs)
        self._bar.update(
            self._bar.task_ids[0], completed=step, description=f"epoch {epoch}/{self._num_epochs}", news=news
        )
        self._bar.refresh()


class _OnTheScreen(logging.Handler):
    """Of warnings alone: errors are told as the run's status, and those with a traceback beside it."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING and not record.exc_info:
            self._console.print(f"note:   {record.getMessage()}", markup=False)


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    best, seconds = summary["best"], summary["seconds"]
    rows = {"status": summary["status"] + (f": {summary['error']}" if summary["error"] else "")}
    if summary["ending"] in ("max_seconds", "patience"):
        rows["status"] += f" ({summary['ending']})"
    if best["value"] is not None:
        rows["best"] = f"{best['metric']} {readable(best['value'])} at step {best['step']}"
    if summary["num_steps"]:
        rows["speed"] = (
            f"{summary['num_steps']:,} steps in {seconds['train']:.2f} s: {summary['steps_per_second']:,.0f} steps/s, "
            f"{summary['samples_per_second']:,.0f} samples/s"
        )
    if summary.get("time"):
        rows["time"] = in_words(summary["time"], summary["step"])
    if summary.get("advice"):
        rows["faster"] = summary["advice"]["words"]
    return rows


def parts_in_words(settings: Settings, parts: Parts) -> list[str]:
    """What was built, in lines for a person: data, model, and what it starts from."""
    sizes = ", ".join(f"{count:,} {name}" for name, count in parts.splits.sizes.items())
    lines = [f"data:   {parts.source.name}, rows: {sizes}; {parts.residency}"]
    lines += [f"data:   {note}" for note in filter(None, (*parts.source.notes, balance(parts.source)))]
    precision = settings.train.precision
    words = (settings.model, f"{parts.num_parameters:,} parameters", precision, parts.layout, parts.threads)
    lines.append(f"model:  {', '.join(word for word in words if word)}")
    notes = (*slow_layers(parts.model, parts.device), about_precision(parts.device, precision))
    lines += [f"model:  {note}" for note in notes if note]
    if parts.weights:
        lines.append(f"starts: {parts.weights}")
    return lines


def what_next(settings: Settings, summary: Mapping[str, Any], folder: Path, *, publishes: bool) -> dict[str, str]:
    """Where the run is to be seen, and the commands that go on from it, by their headings. publishes: False where its sweep
    sends its journal, and says in the end what has become of that."""
    rows, command_folder = {}, shlex.quote(short(folder))
    tracking = settings.tracking
    if tracking.enabled and not publishes:
        rows["MLflow"] = f"sent to {without_password(tracking.uri)} by the sweep"
    elif tracking.enabled:
        uri = without_password(tracking.uri)
        rows["MLflow"] = f"run {summary['run_id']} in {uri}" if summary["run_id"] else f"not reached: {uri}"
        pending = summary["tracker"]["points_pending"] or summary["tracker"].get("files_pending")
        words = f"sync {command_folder}" if pending or not summary["run_id"] else "ui"
        rows["next"] = f"python -m runner {words} {stores.words_for(tracking.uri)}".rstrip()
    if summary["status"] == "killed" or summary["ending"] in ("max_seconds", "disk_full"):
        rows["next"] = f"python -m runner resume {command_folder}"
    if summary["ending"] == "not_finite":
        rows["next"] = f"python -m runner explain {command_folder}"
    if (folder / "rerun.yaml").exists():
        rows["again"] = f"python -m runner -cd {command_folder} -cn rerun seed=1"
    return rows
