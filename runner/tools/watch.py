"""`watch`: live curves of a run or a sweep in the terminal, from the journals that other processes write. `q` leaves.

The terminal is restored however this ends. Curves are drawn in Braille dots, or in `*` where the terminal has none.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.layout import Layout
from rich.table import Table
from rich.text import Text

from runner.command import Arguments, Facts
from runner.config.trust import check_folder
from runner.experiment.terminal import WIDTH, Terminal, readable, seconds, short
from runner.runs import find
from runner.sweep.jobs import ledger
from runner.tasks.metric_names import is_rate
from runner.tools.compare import sweep_folder
from runner.tools.live import LiveRun, Thinned, thin

SECONDS_BETWEEN_READS = 0.5
SECONDS_BETWEEN_KEYS = 0.1
NUM_JSON_POINTS = 500  # of a curve in --json
FOOT = "q leaves, it continues"
COLORS = {"train": "#6c9cff", "val": "#ee854a", "test": "#ffffff"}
OTHER_COLOR = "#8fd18f"
OTHER_JOBS = "#5a6b8c"
STATES = {"running": "green", "finished": "cyan", "failed": "red", "killed": "yellow"}
MIN_ROWS, MIN_COLUMNS = 7, 56  # of a plot
#: the bit of each dot of a Braille character, by row and column
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
BRAILLE = 0x2800


class WatchedRun:
    """A run on the screen: one plot per kind of value, with the splits together."""

    def __init__(self, folder: Path) -> None:
        self.run, self.name = LiveRun(folder), short(folder)

    def read(self) -> bool:
        return self.run.read()

    @property
    def is_over(self) -> bool:
        return self.run.status != "running"

    def as_values(self) -> dict[str, Any]:
        return {"run": self.name, "status": self.run.status, **_values(self.run, self.run.names)}

    def draw(self, width: int, height: int, *, plain: bool, foot: str = "") -> Layout:
        run, kinds = self.run, list(_kinds(self.run).items())
        across = max(1, min(width // MIN_COLUMNS, len(kinds)))
        down = max(1, min((height - 3) // MIN_ROWS, -(-len(kinds) // across)))
        plots = [Layout(_plot(run, kind, names, plain=plain)) for kind, names in kinds[: across * down]]
        plots += [Layout(" ") for _ in range(-len(plots) % across)]
        rows = [Layout() for _ in range(len(plots) // across)]
        for number, row in enumerate(rows):
            row.split_row(*plots[number * across : (number + 1) * across])
        others = [name for _, names in kinds[across * down :] for name in names]
        values = "  ".join(f"{name} {readable(value)}" for name in others if (value := run.last(name)) is not None)
        changed = str(run.start.get("tags", {}).get("changed", ""))
        return _stack(
            self._head(), _line((changed, "dim")), *rows, _line(("  ".join(filter(None, (foot, values))), "dim"))
        )

    def _head(self) -> Text:
        run, total = self.run, self.run.num_steps
        of = f" of {total:,} ({run.step / total:.0%})" if total else ""
        line = _line((self.name, "bold"), "  ", (run.status, STATES.get(run.status, "")), f"  step {run.step:,}{of}")
        speed = run.last("speed/steps_per_second")
        if speed and run.status == "running":
            line.append(f"  {speed:,.0f} steps/s")
            line.append(f"  {seconds(max(0, total - run.step) / speed)} left" if total else "")
        return line


@dataclass(frozen=True)
class WatchedJob:
    """A job of a sweep on the screen."""

    job: ledger.Job
    run: LiveRun | None  # None: it has not begun


class WatchedSweep:
    """A sweep on the screen: a row per job, and the curves of all jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.is_over = folder, short(folder), False
        self.rows: list[WatchedJob] = []
        self._runs: dict[str, LiveRun] = {}

    def read(self) -> bool:
        self.is_over = not ledger.is_running(self.folder)  # before the ledger is read, whose last lines then count
        sweep, before = ledger.read(self.folder), self.rows
        self.rows = []
        for number in sorted(sweep.jobs):
            job = sweep.jobs[number]
            folder = job.folder_name
            self.rows.append(
                WatchedJob(job, self._runs.setdefault(folder, LiveRun(sweep.folder_of(job))) if folder else None)
            )
        has_new_points = [run.read() for run in self._runs.values()]
        return any(has_new_points) or before != self.rows

    def as_values(self) -> dict[str, Any]:
        jobs = [
            {"job": row.job.number, "name": row.job.name, "state": row.job.state, "device": row.job.device or ""}
            | (_values(row.run, [row.run.goal.metric]) if row.run is not None else {})
            for row in self.rows
        ]
        return {"sweep": self.name, "is_running": not self.is_over, "jobs": jobs}

    def draw(self, width: int, height: int, *, plain: bool, foot: str = "") -> Layout:
        rows, room = self.rows, height - 3
        runs = [row.run for row in rows if row.run is not None]
        goal = next((run.goal.metric for run in runs if run.names), "val/loss")
        most = room - MIN_ROWS if len(rows) > room - MIN_ROWS and room > 2 * MIN_ROWS else room
        shown = sorted(rows, key=lambda row: row.job.state in ("planned", "skipped"))[:most]
        counts = ", ".join(f"{count} {state}" for state, count in Counter(row.job.state for row in rows).items())
        head = _line((self.name, "bold"), f"  {len(rows)} jobs: {counts}")
        head.append(f"; {len(shown)} of them here" if len(shown) < len(rows) else "")
        table = _job_table(sorted(shown, key=lambda row: row.job.number), goal)
        has_plot = height - 3 - len(shown) >= MIN_ROWS
        rest = _plot_of_jobs(runs, goal, plain=plain) if has_plot else " "
        return _stack(head, Layout(table, size=len(shown) + 1), Layout(rest), _line((foot, "dim")))


def find_target(wanted: str) -> WatchedRun | WatchedSweep:
    """Return the sweep or the run of this directory, id or `last`. Raises: RunnerError."""
    folder = sweep_folder(wanted)
    if folder is None:
        return WatchedRun(find.locate(wanted, verb="watch"))
    check_folder(folder)
    return WatchedSweep(folder)


def watch(given: Arguments) -> Facts:
    """Show a run or a sweep until it is over, or until `q`. In a pipe, or with `--json`, print it once. Returns its values."""
    target, terminal = find_target(given.run), Terminal(soft_wrap=False)
    target.read()
    is_live = terminal.is_terminal and not terminal.is_dumb_terminal and not target.is_over and not given.is_json
    if is_live and not _follow(target, terminal):
        terminal.print(Text(f"{target.name}: it continues; python -m runner watch {target.name}"), soft_wrap=True)
        return target.as_values()
    height = terminal.height - 1
    frame = target.draw(terminal.width, height, plain=not _has_braille(terminal))
    rows = terminal.render_lines(frame, terminal.options.update(height=height))
    lines = [Text.assemble(*((part.text, part.style or "") for part in row)) for row in rows]
    for line in lines:
        line.rstrip()
    while lines and not lines[-1].plain:
        lines.pop()
    terminal.print(Group(*lines))
    return target.as_values()


def _follow(target: WatchedRun | WatchedSweep, terminal: Terminal) -> bool:
    plain, drawn, last_read = not _has_braille(terminal), None, 0.0
    with _signals_raise(), _keyboard() as typed, terminal.screen(hide_cursor=True) as screen:
        while True:
            is_new = False
            if time.monotonic() - last_read >= SECONDS_BETWEEN_READS:
                is_new, last_read = target.read(), time.monotonic()
            if target.is_over:
                target.read()
                return True
            if is_new or terminal.size != drawn:
                drawn = terminal.size
                screen.update(target.draw(drawn.width, drawn.height, plain=plain, foot=FOOT))
            if "q" in typed(SECONDS_BETWEEN_KEYS):
                return False


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does, and Ctrl-Z does nothing: else the screen would stay as it is."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Any] = {signal.SIGTERM: leave, signal.SIGHUP: leave, signal.SIGTSTP: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a number of seconds and returns the keys typed; they need no Enter."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    keyboard = sys.stdin.fileno()
    settings = termios.tcgetattr(keyboard)

    def typed(seconds: float) -> str:
        is_ready = bool(select.select([keyboard], [], [], seconds)[0])
        return os.read(keyboard, 64).decode(errors="ignore") if is_ready else ""

    try:
        tty.setcbreak(keyboard)
        yield typed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)


def _has_braille(terminal: Terminal) -> bool:
    """Also for a pipe, whose TERM rich does not read."""
    return os.environ.get("TERM") not in ("dumb", "unknown") and terminal.encoding.lower().startswith("utf")


def _values(run: LiveRun, names: Sequence[str]) -> dict[str, Any]:
    metrics = {}
    for name in names:
        points, best = run.points(name), run.best(name)
        if not len(points[0]):
            continue
        curve = thin(points, NUM_JSON_POINTS, first=1, last=max(2, run.step))
        known = ~np.isnan(curve.mean)
        metrics[name] = {
            "points": len(points[0]),
            "last": run.last(name),
            "best": best and {"value": best[0], "step": best[1]},
            "curve": {key: values[known].tolist() for key, values in vars(curve).items()},
        }
    return {"step": run.step, "num_steps": run.num_steps, "goal": run.goal.metric, "metrics": metrics}


def _kinds(run: LiveRun) -> dict[str, list[str]]:
    """Return the metrics' names by what they measure: the loss first, then the metric that decides which is best."""
    kinds: dict[str, list[str]] = {}
    for name in run.names:
        split, _, kind = name.partition("/")
        kinds.setdefault(kind if split in COLORS and not is_rate(name) else name, []).append(name)
    goal, splits = run.goal.metric.partition("/")[2], list(COLORS)

    def order(kind: str) -> tuple[bool, ...]:
        is_curve = any(len(run.points(name)[0]) > 1 for name in kinds[kind])
        return kind != "loss", kind != goal, not is_curve, not any(name.startswith("val/") for name in kinds[kind])

    def place(name: str) -> int:
        split = name.partition("/")[0]
        return splits.index(split) if split in splits else len(splits)

    return {kind: sorted(kinds[kind], key=place) for kind in sorted(kinds, key=order)}


def _job_table(rows: Sequence[WatchedJob], goal: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in ("job", "name", "state", "step", goal, "best"):
        is_text = title in ("name", "state")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=title != "name")
    for row in rows:
        run, name = row.run, _line(row.job.name or ledger.DEFAULTS)
        cells: list[RenderableType] = [str(row.job.number), name]
        cells.append(Text(row.job.state, STATES.get(row.job.state, "dim")))
        if run is None or not run.names:
            table.add_row(*cells)
            continue
        of = f"/{run.num_steps:,}" if run.num_steps else ""
        last, best = run.last(goal), run.best(goal)
        values = (readable(value) if value is not None else "" for value in (last, best and best[0]))
        table.add_row(*cells, f"{run.step:,}{of}", *values)
    return table


def _plot(run: LiveRun, kind: str, names: Sequence[str], *, plain: bool) -> Plot:
    title, curves = _line((kind, "bold")), []
    for name in names:
        value, best, split = run.last(name), run.best(name), name.partition("/")[0]
        color = COLORS.get(split, OTHER_COLOR)
        if value is not None:
            title.append(f"  {f'{split} ' * (name != kind)}{readable(value)}", color)
        if best is not None and split == "val":
            title.append(f" (best {readable(best[0])} at {best[1]:,})", color)
        curves.append(PlottedCurve(run, name, color))
    return Plot(title, curves, is_loss=kind == "loss", plain=plain)


def _plot_of_jobs(runs: Sequence[LiveRun], goal: str, *, plain: bool) -> Plot:
    title = _line((goal, "bold"), (" of all, the best in colour", "dim"))
    best = [(-found[0] if run.goal.mode == "max" else found[0], run) for run in runs if (found := run.best(goal))]
    ranked = [run for _, run in sorted(best, key=lambda pair: pair[0])]
    curves = [PlottedCurve(run, goal, OTHER_JOBS if number else COLORS["val"]) for number, run in enumerate(ranked)]
    return Plot(title, curves[::-1], is_loss=goal.endswith("/loss"), plain=plain)  # the best one on top


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _stack(*parts: Text | Layout) -> Layout:
    layout = Layout()
    layout.split_column(*(part if isinstance(part, Layout) else Layout(part or " ", size=1) for part in parts))
    return layout


@dataclass(frozen=True)
class PlottedCurve:
    """A metric of a run, and its color."""

    run: LiveRun
    name: str
    color: str


@dataclass(frozen=True)
class Plot:
    """A title, curves with an axis, and the steps below, as large as the place on the screen."""

    title: Text
    curves: Sequence[PlottedCurve]
    is_loss: bool
    plain: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = max(1, options.max_width - WIDTH - 3)
        yield self.title
        last = max([2, *(curve.run.step for curve in self.curves)])
        yield from self._lines(width, max(1, (options.height or MIN_ROWS) - 2), last)
        yield Text(f"{'':>{WIDTH + 1}}1{f'step {last:,}':>{width - 1}}", "dim", no_wrap=True)

    def _lines(self, width: int, height: int, last: int) -> list[Text]:
        columns = width * (1 if self.plain else 2)
        drawn = [(each, thin(each.run.points(each.name), columns, first=1, last=last)) for each in self.curves]
        known = [curve for _, curve in drawn if not np.isnan(curve.mean).all()]
        if not known:
            return [Text("  nothing yet", "dim"), *(Text() for _ in range(height - 1))]
        low = min(float(np.nanmin(curve.least)) for curve in known)
        high = max(float(np.nanmax(curve.greatest)) for curve in known)
        if low == high:
            low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
        is_log = self.is_loss and low > 0 and high > 3 * low
        canvas = Canvas(width, height, low=low, high=high, is_log=is_log, plain=self.plain)
        for each, curve in drawn:
            canvas.draw(curve, each.color)
        labels = {0: high, height // 2: math.sqrt(low * high) if is_log else (low + high) / 2, height - 1: low}
        edge, tick = ("|", "|") if self.plain else ("│", "┤")
        return [
            Text(f"{readable(labels[row]):>{WIDTH}}{tick}" if row in labels else f"{'':>{WIDTH}}{edge}", "dim") + line
            for row, line in enumerate(canvas.lines())
        ]


class Canvas:
    """A field of characters. A later curve replaces the characters of an earlier one."""

    def __init__(
        self, width: int, height: int, *, low: float, high: float, is_log: bool = False, plain: bool = False
    ) -> None:
        """low, high: values at the lower and the upper edge. plain: `*` instead of Braille."""
        self._bits = np.ones((1, 1), int) if plain else DOTS
        self._plain, self._scale = plain, math.log if is_log else float
        self._low, self._high = self._scale(low), self._scale(high)
        self._is_log = is_log
        self._dots = np.zeros((height, width), int)
        self._styles = np.full((height, width), "", object)

    @property
    def columns(self) -> int:
        """Number of dots side by side."""
        return int(self._dots.shape[1] * self._bits.shape[1])

    def draw(self, curve: Thinned, style: str) -> None:
        """Draw a line through the means."""
        places = np.flatnonzero(~np.isnan(curve.mean))
        if not len(places):
            return
        columns = np.arange(places[0], places[-1] + 1)
        rows = np.rint(np.interp(columns, places, self._rows(curve.mean[places]))).astype(int)
        following = np.append(rows[1:], rows[-1])
        reach = rows + np.sign(following - rows) * np.maximum(abs(following - rows) - 1, 0)  # next to the next column
        self._fill(columns, np.minimum(rows, reach), np.maximum(rows, reach), style)

    def lines(self) -> list[Text]:
        found = []
        for dots, styles in zip(self._dots.tolist(), self._styles.tolist(), strict=True):
            shown = [(("*" if self._plain else chr(BRAILLE + bits)) if bits else " ") for bits in dots]
            found.append(Text.assemble(*zip(shown, styles, strict=True), no_wrap=True))
        return found

    def _rows(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        heights = np.log(values) if self._is_log else values
        last = len(self._dots) * len(self._bits) - 1
        rows = np.rint((self._high - heights) / ((self._high - self._low) or 1.0) * last)
        return np.asarray(np.clip(rows, 0, last), np.int64)

    def _fill(self, columns: NDArray[np.int64], top: NDArray[np.int64], bottom: NDArray[np.int64], style: str) -> None:
        (height, width), (down, across) = self._dots.shape, self._bits.shape
        dots = np.zeros((height * down, width * across), bool)
        rows = np.arange(len(dots))[:, None]
        dots[:, columns] = (rows >= top) & (rows <= bottom)
        bits = (dots.reshape(height, down, width, across) * self._bits[:, None, :]).sum((1, 3))
        self._dots = np.where(bits > 0, bits, self._dots)
        self._styles = np.where(bits > 0, style, self._styles)
