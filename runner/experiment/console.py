"""Shows a run in the terminal: a bar and a line per epoch, the results at the end; the same text goes to runner.log.

Used by session.py. Windows and epochs arrive in the background thread.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Column
from rich.text import Text

from runner.config.importing import log_file
from runner.config.settings import Settings
from runner.device import Choice
from runner.device.precision import precision_note
from runner.errors import harmless, without_password
from runner.experiment.directory import CONSOLE, Run
from runner.experiment.summary import Summary, time_in_words
from runner.experiment.terminal import Terminal, labeled, readable, row, seconds, short, text_table
from runner.tasks.metric_names import is_rate
from runner.tracking import stores
from runner.tracking.ack import read_ack
from runner.training.metric_buffer import Window
from runner.training.observer import EpochEnd
from runner.training.parts import Parts

log = logging.getLogger("runner")

#: the bar is drawn when values arrive, at most this often: a drawing thread would compete with training for the lock
SECONDS_BETWEEN_FRAMES = 0.25
SECONDS_BETWEEN_LINES = 2.0  # in a pipe
MAX_EPOCH_LINES = 20  # that stay in a terminal
MAX_HINTS = 3
SPLITS = ("train", "val", "test")
COLORS = {"finished": "green", "pruned": "yellow", "killed": "yellow", "failed": "red"}
#: texts for the `ending` of a training
ENDINGS = {"max_seconds": " (train.max_seconds)", "patience": " (early stopping)"}


class Screen:
    """The terminal of one run: a bar and lines that stay, or only lines in a pipe."""

    def __init__(self, console: Console | None = None, *, log: logging.Logger = log) -> None:
        self.console, self._log = console or Terminal(), log
        self._bar: Progress | None = None
        self._num_epochs = self._num_steps = self._epoch = self._printed_step = 0
        self._drawn = self._printed = self._speed = 0.0
        self._train: dict[str, float] = {}  # the last point since the last epoch's line
        self._news: dict[str, float] = {}  # the last values of all names, for the bar
        self._held: Text | None = None  # the last epoch's line, while it is not printed

    @classmethod
    @contextmanager
    def into(cls, folder: Path) -> Iterator[Screen]:
        """Yield the screen of one of several runs in a process, which writes to its directory's console.log and runner.log."""
        handler = log_file(folder)
        own = logging.Logger("runner", logging.INFO)
        own.addHandler(handler)
        with (folder / CONSOLE).open("a", buffering=1, encoding="utf-8") as file, closing(handler):
            yield cls(Terminal(file=file), log=own)

    def say(self, text: str, *, in_log: str | None = None) -> None:
        """Print one line and log it, or log `in_log` instead."""
        self._log.info(in_log or text)
        self.console.print(labeled(text))

    @contextmanager
    def with_warnings(self) -> Iterator[None]:
        """Show logged warnings on the screen too."""
        handler = _OnTheScreen(self.console)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    @contextmanager
    def training(self, *, num_steps: int, num_epochs: int) -> Iterator[None]:
        """Show the progress of a training while the context is open."""
        self._num_epochs, self._num_steps = num_epochs, num_steps
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
        )
        with ExitStack() as opened:
            if self.console.is_terminal:
                bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True, expand=True)
                self._bar = opened.enter_context(bar)
                bar.add_task(f"epoch 1/{num_epochs}", total=num_steps, news="")
            try:
                yield
            finally:
                self._print_epoch()
                self._bar = None

    def window(self, window: Window) -> None:
        """Take the values of a window. Called in the background thread."""
        self._speed = window.num_steps / max(window.seconds, 1e-9)
        self._train = dict(zip(window.names, map(float, window.values[-1]), strict=True))
        self._news |= self._train
        self._draw(int(window.steps[-1]))

    def epoch(self, end: EpochEnd) -> None:
        """Show an epoch's values. Called in the background thread."""
        values, self._train = {**self._train, **end.values}, {}
        self._epoch = end.epoch
        self._news.update(end.values)
        number, width = f"{end.epoch:>{len(str(self._num_epochs))}}/{self._num_epochs}", len(f"{self._num_steps:,}")
        texts = [f"{name} {readable(value)}" for name, value in values.items()]
        texts += [f"stop {end.reached}"] if end.reached else []
        text = row("epoch", f"{number}  step {end.step:>{width},}  {'  '.join(texts)}")
        self._log.info(text)
        self._held = Text.assemble(labeled(text), ("  *", "bold green") if end.is_best else "")
        is_due = end.step - self._printed_step >= self._num_steps / MAX_EPOCH_LINES
        if self._bar is None:
            is_due = time.monotonic() - self._printed > SECONDS_BETWEEN_LINES
        if is_due:
            self._printed_step, self._printed = end.step, time.monotonic()
            self._print_epoch()
        self._draw(end.step)

    def result(self, summary: Summary, *, folder: Path, rows: Mapping[str, str | Text]) -> None:
        """Print the results: the values by split, how the run ended, and the commands to continue. Hints come last."""
        values = {name: readable(value) for name, value in summary.metrics.items() if not is_rate(name)}
        columns = [split for split in SPLITS if any(name.startswith(f"{split}/") for name in values)]
        metrics = dict.fromkeys(name.partition("/")[2] for name in values if name.partition("/")[0] in columns)
        table = [[metric, *(values.get(f"{split}/{metric}", "") for split in columns)] for metric in metrics]
        if columns:
            self.console.print("", text_table(["", *columns], table, right=range(1, 4)), "", sep="\n")
        self.console.print(_headline(summary))
        for name, text in {**_facts(summary, folder), **rows}.items():
            self.console.print(Text.assemble((row(name, ""), "bold"), text))
        self.hints(summary.hints)

    def hints(self, hints: Sequence[str]) -> None:
        """Print the first hints, and log all of them."""
        for number, hint in enumerate(hints):
            self._log.info(f"hint: {hint}")
            if number < MAX_HINTS:
                self.console.print(Text.assemble(("hint:", "cyan"), f" {hint}"))

    def end_now(self, text: str) -> None:
        """Print the last line of a process that ends at once, and show the cursor that the bar has hidden."""
        self.console.show_cursor()
        self.say(text)

    def _print_epoch(self) -> None:
        line, self._held = self._held, None
        if line is not None:
            self.console.print(line)

    def _draw(self, step: int) -> None:
        bar = self._bar  # training() may end at any time
        if bar is None or time.monotonic() - self._drawn < SECONDS_BETWEEN_FRAMES:
            return
        self._drawn = time.monotonic()
        values = "  ".join(f"{name} {readable(value)}" for name, value in self._news.items())
        epoch = min(self._epoch + 1, self._num_epochs)
        name = f"epoch {epoch}/{self._num_epochs}"
        bar.update(bar.task_ids[0], completed=step, description=name, news=f"{self._speed:,.0f} steps/s  {values}")
        bar.refresh()


class _OnTheScreen(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING and not record.exc_info:
            self._console.print(Text.assemble(("warning:", "yellow"), f" {record.getMessage()}"))


def _headline(summary: Summary) -> Text:
    status, total, num_steps = summary.status, summary.seconds["total"], summary.num_steps
    is_good = status in ("finished", "pruned")
    took = f"{total:.1f} s" if total < 100 else seconds(total)
    text = f"{'stopped' if status == 'killed' else status} {'in' if status == 'finished' else 'after'} {took}"
    steps = f"   {num_steps:,} steps, {summary.steps_per_second:,.0f} steps/s" if num_steps else ""
    error = f"   {summary.error}" if summary.error else ""
    return Text.assemble(
        (f"{'✓' if is_good else '✗'} {text}", f"bold {COLORS[status]}"),
        f" ({summary.ending})" if summary.ending.startswith("train.") else ENDINGS.get(summary.ending, ""),
        error or steps,
    )


def _facts(summary: Summary, folder: Path) -> dict[str, str]:
    best, rows = summary.best, {}
    if best["value"] is not None:
        rows["best"] = f"{best['metric']} {readable(best['value'])} (step {best['step']:,})"
        if (weights := folder / "checkpoints" / "best.pt").is_file():
            rows["best"] += f"  {short(weights)}"
    if summary.time:
        rows["time"] = time_in_words(summary.time)
    return rows


def device_row(choice: Choice) -> tuple[str, str]:
    """Return the line for the device, shorter where the reason is the usual one, and the line for the log."""
    first, _, rest = choice.reason.partition("; ")
    is_usual = rest.endswith(("no NVIDIA GPU either", "no NVIDIA GPU shows"))
    in_log = row("device", f"{choice.device} ({choice.reason})")
    return row("device", f"{choice.device} ({first})") if is_usual else in_log, in_log


def describe_parts(settings: Settings, parts: Parts) -> Iterator[tuple[str, str]]:
    """Yield what was built as lines for the screen, each with its longer form for the log, which has the reasons too."""
    sizes = ", ".join(f"{count:,} {name}" for name, count in parts.splits.sizes.items())
    data = row("data", f"{parts.source.name}: {sizes} examples")
    at = "" if parts.device.type == "cpu" else ", in device memory"
    yield f"{data}{at if parts.residency.startswith('on the device') else ', streamed'}", f"{data}; {parts.residency}"
    for note in parts.source.notes:
        yield (row("data", note),) * 2
    precision = settings.train.precision
    trained = parts.num_trained if parts.num_trained < parts.num_parameters else None
    shown = f"{settings.model}: {parts.num_parameters:,} parameters{f' ({trained:,} trained)' if trained else ''}"
    model = row("model", f"{shown}, {precision}")
    details = [words for words in (parts.layout, parts.threads) if words]
    yield ", ".join([model, *(words.partition(" (")[0] for words in details)]), ", ".join([model, *details])
    if note := precision_note(parts.device, precision):
        yield (row("model", note),) * 2
    if parts.schedule.words:
        yield (row("rate", parts.schedule.words),) * 2
    if parts.weights:
        yield (row("starts", parts.weights),) * 2


def last_rows(settings: Settings, summary: Summary, folder: Path, *, publishes: bool) -> dict[str, str | Text]:
    """Return where the run is in MLflow and the commands that continue it, by label.

    publishes: False if the run's sweep sends its journal and reports that at its end.
    """
    rows: dict[str, str | Text] = {}
    run, tracking = shlex.quote(short(folder)), settings.tracking
    if tracking.enabled and not publishes:
        rows["mlflow"] = f"sent to {without_password(tracking.uri)} by the sweep"
    elif tracking.enabled:
        pending = summary.tracker.get("points_pending") or summary.tracker.get("files_pending")
        is_complete = bool(summary.run_id) and not pending
        rows["mlflow"] = _in_mlflow(summary, folder, tracking.uri, is_complete=is_complete)
        if not is_complete:
            rows["sync"] = f"python -m runner sync {run} {stores.words_for(tracking.uri)}".rstrip()
    if summary.ending == "not_finite":
        rows["explain"] = f"python -m runner explain {run}"
    elif (
        summary.status == "killed"
        or summary.ending in ("max_seconds", "disk_full")
        or (summary.status == "failed" and Run(folder).is_resumable)
    ):
        rows["resume"] = f"python -m runner resume {run}"
    if (folder / "rerun.yaml").exists():
        rows["rerun"] = f"python -m runner -cd {run} -cn rerun"
    return rows


def _in_mlflow(summary: Summary, folder: Path, uri: str, *, is_complete: bool) -> str | Text:
    where = without_password(uri)
    if not is_complete:
        return f"{where}  (incomplete)" if summary.run_id else f"not reached: {where}"
    experiment = read_ack(folder).experiment_id
    if uri.startswith("http") and where == uri and experiment:
        url = harmless(f"{where.rstrip('/')}/#/experiments/{experiment}/runs/{summary.run_id}")
        return Text(url, Style(link=url))
    return f"{where}  (view: {f'python -m runner ui {stores.words_for(uri)}'.rstrip()})"
