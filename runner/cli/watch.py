"""`python -m runner watch RUN`: live curves of a run or a sweep in the terminal, from its journal; `q` leaves, it goes on.

It reads what another process writes, and writes nothing. The terminal is as it was afterwards, however this ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from runner.cli import frames
from runner.cli.compare import sweep_folder
from runner.config.trust import check_folder
from runner.experiment.terminal import Terminal, short
from runner.runs import find
from runner.runs.live import Live, thin
from runner.sweep.jobs import ledger

SECONDS_BETWEEN_READS = 0.5
SECONDS_BETWEEN_KEYS = 0.1
POINTS_FOR_PROGRAMS = 500  # of a curve
FOOT = "q leaves, it goes on"


class OfRun:
    """A run."""

    def __init__(self, folder: Path) -> None:
        self.run, self.name = Live(folder), short(folder)

    def read(self) -> bool:
        return self.run.read()

    @property
    def is_over(self) -> bool:
        return self.run.status != "running"

    def frame(self, width: int, height: int, *, plain: bool, foot: str) -> list[Text]:
        return frames.of_run(self.run, self.name, width, height, plain=plain, foot=foot)

    def as_values(self) -> dict[str, Any]:
        return {"run": self.name, "status": self.run.status, **_values(self.run, self.run.names)}


class OfSweep:
    """A sweep's jobs, those that have begun with their points."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, short(folder)
        self.rows: list[frames.Row] = []
        self._lives: dict[str, Live] = {}
        self._is_over = False

    def read(self) -> bool:
        is_running = ledger.is_running(self.folder)  # before the ledger: what it wrote at its end is read then
        sweep, before = ledger.read(self.folder), self.rows
        self.rows = []
        for number in sorted(sweep.jobs):
            job = sweep.jobs[number]
            live = self._lives.setdefault(job.folder_name, Live(sweep.folder_of(job))) if job.folder_name else None
            self.rows.append(frames.Row(number, job.name, job.state, job.device or "", live))
        self._is_over = not is_running
        news = [live.read() for live in self._lives.values()]
        return any(news) or before != self.rows

    @property
    def is_over(self) -> bool:
        return self._is_over

    def frame(self, width: int, height: int, *, plain: bool, foot: str) -> list[Text]:
        return frames.of_sweep(self.rows, self.name, width, height, plain=plain, foot=foot)

    def as_values(self) -> dict[str, Any]:
        jobs = [
            {"job": row.number, "name": row.name, "state": row.state, "device": row.device}
            | (_values(row.live, [row.live.goal.metric]) if row.live is not None else {})
            for row in self.rows
        ]
        return {"sweep": self.name, "is_running": not self.is_over, "jobs": jobs}


def watched(wanted: str) -> OfRun | OfSweep:
    """What is meant: a sweep's folder or id, or a run as runs.find takes it. Raises: RunnerError."""
    folder = sweep_folder(wanted)
    if folder is None:
        return OfRun(find.locate(wanted, verb="watch"))
    check_folder(folder)
    return OfSweep(folder)


def watch(wanted: str, *, once: bool = False) -> dict[str, Any]:
    """Shows it until it is over, or `q`; once, or where nobody looks at a screen: one frame. Returns what is shown last."""
    target, terminal = watched(wanted), Terminal(soft_wrap=False)
    target.read()
    is_live = terminal.is_terminal and not terminal.is_dumb_terminal and not target.is_over and not once
    if is_live and not _follow(target, terminal):
        terminal.print(Text(f"{target.name}: it goes on; python -m runner watch {target.name}"), soft_wrap=True)
        return target.as_values()
    lines = target.frame(terminal.width, terminal.height - 1, plain=not _shows_braille(terminal), foot="")
    for line in lines:
        line.rstrip()
    while lines and not lines[-1].plain:
        lines.pop()
    terminal.print(Group(*map(_ended, lines)))
    return target.as_values()


def _follow(target: OfRun | OfSweep, terminal: Terminal) -> bool:
    plain, drawn, read = not _shows_braille(terminal), None, 0.0
    with _keys() as pressed, terminal.screen(hide_cursor=True) as screen:
        while True:
            now = time.monotonic()
            is_due = now - read >= SECONDS_BETWEEN_READS
            is_new = is_due and target.read()
            if is_due:
                read = now
            if target.is_over:
                target.read()
                return True
            if is_new or terminal.size != drawn:
                drawn = terminal.size
                lines = target.frame(drawn.width, drawn.height, plain=plain, foot=FOOT)
                screen.update(Group(*map(_ended, lines[:-1]), lines[-1]))
            if "q" in pressed(SECONDS_BETWEEN_KEYS):
                return False


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so long for keys and returns them; without a keyboard it waits.

    SIGTERM ends this as Ctrl-C does, and Ctrl-Z does nothing: neither would give the screen back.
    """

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    handlers: dict[str, Any] = {"SIGTERM": leave, "SIGHUP": leave, "SIGTSTP": signal.SIG_IGN}
    numbers = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        with _one_by_one() as pressed:
            yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _one_by_one() -> Iterator[Callable[[float], str]]:
    if not sys.stdin.isatty():

        def nothing(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield nothing
    elif sys.platform == "win32":
        import msvcrt

        def typed(seconds: float) -> str:
            time.sleep(seconds)
            return msvcrt.getwch() if msvcrt.kbhit() else ""

        yield typed
    else:
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        settings = termios.tcgetattr(keyboard)

        def pressed(seconds: float) -> str:
            is_ready = bool(select.select([keyboard], [], [], seconds)[0])
            return os.read(keyboard, 64).decode(errors="ignore") if is_ready else ""

        try:
            tty.setcbreak(keyboard)
            yield pressed
        finally:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)


def _ended(line: Text) -> Text:
    line.end = "\n"
    return line


def _shows_braille(terminal: Terminal) -> bool:
    """Also over a pipe, where rich does not ask."""
    return os.environ.get("TERM") not in ("dumb", "unknown") and terminal.encoding.lower().startswith("utf")


def _values(run: Live, names: list[str]) -> dict[str, Any]:
    last = max(2, run.step)
    metrics = {}
    for name in names:
        steps, values = points = run.points(name)
        if not len(steps):
            continue
        curve, best = thin(points, POINTS_FOR_PROGRAMS, first=1, last=last), run.best(name)
        places = np.flatnonzero(~np.isnan(curve.mean))
        columns = {"least": curve.least, "greatest": curve.greatest, "mean": curve.mean}
        metrics[name] = {
            "points": len(steps),
            "last": run.last(name),
            "best": best and {"value": best[0], "step": best[1]},
            "curve": {"steps": _first_steps(steps[np.isfinite(values)], places, last=last).tolist()}
            | {key: found[places].tolist() for key, found in columns.items()},
        }
    return {"step": run.step, "num_steps": run.num_steps, "goal": run.goal.metric, "metrics": metrics}


def _first_steps(
    steps: NDArray[np.int64],  # (n,) that have a value
    places: NDArray[np.int64],  # (k,) columns of thin() with some of them
    *,
    last: int,
) -> NDArray[np.int64]:
    begins = 1 - (-places * last // POINTS_FOR_PROGRAMS)  # thin() rounds down, so this rounds up
    there = np.unique(steps)
    return there[np.searchsorted(there, begins)]
