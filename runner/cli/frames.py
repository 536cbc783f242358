"""Puts a run, or the jobs of a sweep, in a frame of columns and rows: curves, values, progress. For `watch`.

Curves are drawn in characters: eight dots each where the terminal can show Braille, else one sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from runner.experiment.terminal import WIDTH, readable, seconds
from runner.runs.live import Live, Thinned, thin
from runner.sweep.jobs.ledger import DEFAULTS
from runner.tasks.metric_names import is_rate

#: bright, and the band behind it
COLORS = {"train": ("#6c9cff", "#2f4a80"), "val": ("#ee854a", ""), "test": ("#ffffff", "")}
OTHERS = ("#8fd18f", "")
OTHER_JOBS = "#5a6b8c"
LEAST_ROWS, LEAST_COLUMNS, LEAST_SPARK = 7, 56, 8  # of a panel, and of a job's curve
STATES = {"running": "green", "finished": "cyan", "failed": "red", "killed": "yellow"}


@dataclass(frozen=True)
class Row:
    """A job of a sweep. live: None until it has begun."""

    number: int
    name: str
    state: str
    device: str
    live: Live | None


@dataclass(frozen=True)
class Drawn:
    """A curve: a run's metric in a colour, and in another one what lies behind its means."""

    run: Live
    name: str
    style: str
    band: str = ""


def of_run(run: Live, name: str, width: int, height: int, *, plain: bool, foot: str) -> list[Text]:
    """A panel for each kind of value, its splits together: the loss first, then what the run is judged by."""
    head = [
        _line(_heading(run, name), width),
        _line(Text(str(run.start.get("tags", {}).get("changed", "")), "dim"), width),
    ]
    kinds = _kinds(run)
    room = height - len(head) - 1
    across = max(1, min(width // LEAST_COLUMNS, len(kinds) or 1))
    down = max(1, min(room // LEAST_ROWS, -(-len(kinds) // across)))
    shown = list(kinds.items())[: across * down]
    lines = list(head)
    for number in range(down):
        rows = room // down + (number < room % down)
        columns = width // across
        panels = [
            panel(run, kind, names, columns - 1, rows, plain=plain)
            for kind, names in shown[number * across : (number + 1) * across]
        ]
        for parts in zip(*panels, strict=True):
            lines.append(Text(" ", end="", no_wrap=True).join(_padded(part, columns - 1) for part in parts))
    rest = [name for names in list(kinds.values())[across * down :] for name in names]
    values = "  ".join(f"{name} {readable(value)}" for name in rest if (value := run.last(name)) is not None)
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines, _line(Text(f"{foot}  {values}" if foot else values, "dim"), width)]


def of_sweep(rows: Sequence[Row], name: str, width: int, height: int, *, plain: bool, foot: str) -> list[Text]:
    """A row for each job with its curve, and below them the curves of all."""
    counts = {state: sum(row.state == state for row in rows) for state in dict.fromkeys(row.state for row in rows)}
    begun = [row.live for row in rows if row.live is not None]
    goal = next((live.goal.metric for live in begun if live.names), "val/loss")
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [_line(Text.assemble((name, "bold"), f"  {len(rows)} jobs: {told}"), width)]
    room = height - 3
    most = room - LEAST_ROWS if len(rows) > room - LEAST_ROWS and room > 2 * LEAST_ROWS else min(len(rows), room)
    shown = [row for row in rows if row.state not in ("planned", "skipped")] + [
        row for row in rows if row.state in ("planned", "skipped")
    ]
    shown = sorted(shown[:most], key=lambda row: row.number)
    lines += _job_rows(shown, goal, width, plain=plain)
    if len(rows) > len(shown):
        lines[0] = _line(lines[0] + Text(f"; {len(shown)} of them here"), width)
    if (left := height - 1 - len(lines)) >= LEAST_ROWS:
        lines += _together(begun, goal, width, left, plain=plain)
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines, _line(Text(foot, "dim"), width)]


def panel(run: Live, kind: str, names: Sequence[str], width: int, height: int, *, plain: bool) -> list[Text]:
    """One kind of value: a line with the last values, the curves with their axis, and the steps."""
    title = Text(kind, "bold", no_wrap=True, end="")
    for name in names:
        value, best = run.last(name), run.best(name)
        split = name.partition("/")[0]
        if value is not None:
            title.append(f"  {f'{split} ' * (name != kind)}{readable(value)}", _colors(name)[0])
        if best is not None and split == "val":
            title.append(f" (best {readable(best[0])} at {best[1]:,})", _colors(name)[0])
    last = max(2, run.step)
    drawn = [Drawn(run, name, *_colors(name)) for name in names]
    body = _field(drawn, width, height - 2, last=last, kind=kind, plain=plain)
    return [_line(title, width), *body, _steps(last, width)]


def _field(drawn: Sequence[Drawn], width: int, height: int, *, last: int, kind: str, plain: bool) -> list[Text]:
    columns = (width - WIDTH - 2) * (1 if plain else 2)
    curves = [thin(each.run.points(each.name), columns, first=1, last=last) for each in drawn]
    known = [curve for curve in curves if not np.isnan(curve.mean).all()]
    if not known:
        return [Text("  nothing yet", "dim")] + [Text()] * (height - 1)
    low, high = (
        min(float(np.nanmin(each.least)) for each in known),
        max(float(np.nanmax(each.greatest)) for each in known),
    )
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    is_log = kind == "loss" and low > 0 and high > 3 * low
    canvas = Canvas(width - WIDTH - 2, height, low=low, high=high, is_log=is_log, plain=plain)
    for each, curve in zip(drawn, curves, strict=True):
        is_many = len(each.run.points(each.name)[0]) > columns
        canvas.curve(curve, each.style, band=each.band if is_many else "")
    middle = float(np.sqrt(low * high)) if is_log else (low + high) / 2
    labels = {0: high, height // 2: middle, height - 1: low}
    edge, mark = ("|", "|") if plain else ("│", "┤")
    return [
        Text.assemble(
            (f"{readable(labels[row]) if row in labels else '':>{WIDTH}}", "dim"),
            (mark if row in labels else edge, "dim"),
            line,
        )
        for row, line in enumerate(canvas.lines())
    ]


def _job_rows(rows: Sequence[Row], goal: str, width: int, *, plain: bool) -> list[Text]:
    cells = [("job", "name", "state", "step", goal, "best"), *map(partial(_cells, goal), rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    room = width - sum(widths) - len(widths) - LEAST_SPARK
    widths[1] = max(LEAST_SPARK, widths[1] + min(0, room))
    spark = min(40, width - sum(widths) - len(widths))
    lines = []
    for number, found in enumerate(cells):
        line, live = Text(style="" if number else "bold"), rows[number - 1].live if number else None
        for column, (cell, of) in enumerate(zip(found, widths, strict=True)):
            shown = cell if len(cell) <= of else f"{cell[: of - 1]}…"
            style = STATES.get(cell, "dim") if number and column == 2 else ""
            line.append(f"{shown:<{of}} " if column in (1, 2) else f"{shown:>{of}} ", style)
        if live is not None and spark >= LEAST_SPARK:
            line.append_text(_spark(live, goal, spark, plain=plain))
        lines.append(_line(line, width))
    return lines


def _cells(goal: str, row: Row) -> tuple[str, ...]:
    live = row.live
    name = row.name or DEFAULTS
    if live is None or not live.names:
        return str(row.number), name, row.state, "", "", ""
    of = f"/{live.num_steps:,}" if live.num_steps else ""
    value, best = live.last(goal), live.best(goal)
    values = (readable(found) if found is not None else "" for found in (value, best[0] if best else None))
    return str(row.number), name, row.state, f"{live.step:,}{of}", *values


def _spark(run: Live, metric: str, width: int, *, plain: bool) -> Text:
    curve = thin(run.points(metric), width * (1 if plain else 2), first=1, last=max(2, run.step))
    if plain or np.isnan(curve.mean).all():
        return Text()
    canvas = Canvas(width, 1, low=float(np.nanmin(curve.mean)), high=float(np.nanmax(curve.mean)))
    canvas.curve(curve, OTHERS[0])
    return canvas.lines()[0]


def _together(runs: Sequence[Live], goal: str, width: int, height: int, *, plain: bool) -> list[Text]:
    known = [
        (best[0] if not run.goal.is_rising else -best[0], number)
        for number, run in enumerate(runs)
        if (best := run.best(goal))
    ]
    ranked = [runs[number] for _, number in sorted(known)]
    last = max([2, *(run.step for run in ranked)])
    drawn = [Drawn(run, goal, OTHER_JOBS if number else COLORS["val"][0]) for number, run in enumerate(ranked)]
    title = _line(Text.assemble((goal, "bold"), (" of all, the best in colour", "dim")), width)
    kind = goal.partition("/")[2]
    field = _field(drawn[::-1], width, height - 2, last=last, kind=kind, plain=plain)  # the best one on top
    return [title, *field, _steps(last, width)]


def _kinds(run: Live) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in run.names:
        split, _, kind = name.partition("/")
        kinds.setdefault(kind if split in COLORS and not is_rate(name) else name, []).append(name)
    goal = run.goal.metric.partition("/")[2]

    def order(kind: str) -> tuple[bool, ...]:
        is_curve = any(len(run.points(name)[0]) > 1 for name in kinds[kind])
        return kind != "loss", kind != goal, not is_curve, not any(name.startswith("val/") for name in kinds[kind])

    return {kind: sorted(kinds[kind], key=_place) for kind in sorted(kinds, key=order)}


def _place(name: str) -> int:
    split = name.partition("/")[0]
    return list(COLORS).index(split) if split in COLORS else len(COLORS)


def _colors(name: str) -> tuple[str, str]:
    return COLORS.get(name.partition("/")[0], OTHERS)


def _heading(run: Live, name: str) -> Text:
    status, total = run.status, run.num_steps
    of = f" of {total:,} ({run.step / total:.0%})" if total else ""
    line = Text.assemble((name, "bold"), "  ", (status, STATES.get(status, "")), f"  step {run.step:,}{of}")
    speed = run.last("speed/steps_per_second")
    if speed and status == "running":
        line.append(f"  {speed:,.0f} steps/s")
        if total:
            line.append(f"  {seconds(max(0, total - run.step) / speed)} left")
    return line


def _steps(last: int, width: int) -> Text:
    left, right = "1", f"step {last:,}"
    return Text(f"{'':>{WIDTH + 1}}{left}{right:>{max(0, width - WIDTH - 3)}}", "dim", no_wrap=True, end="")


def _line(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    text.no_wrap, text.end = True, ""
    return text


def _padded(text: Text, width: int) -> Text:
    return _line(text + Text(" " * max(0, width - text.cell_len)), width)


#: the bit of each dot of a character, by row and column
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
BRAILLE = 0x2800


class Canvas:
    """A field of characters. What is drawn later takes a character whole."""

    def __init__(
        self, width: int, height: int, *, low: float, high: float, is_log: bool = False, plain: bool = False
    ) -> None:
        """low, high: the values at its edges. plain: no Braille."""
        self.width, self.height, self.plain = width, height, plain
        self.down, self.across = (1, 1) if plain else DOTS.shape
        self.columns = width * self.across
        self._is_log = is_log
        self._low, self._high = (math.log(low), math.log(high)) if is_log else (low, high)
        self._dots = np.zeros((height, width), int)
        self._styles = np.full((height, width), "", object)

    def curve(self, curve: Thinned, style: str, *, band: str = "") -> None:
        """A line through the means, over a band from the least to the greatest values (band: its style; "" for none)."""
        is_there = np.flatnonzero(~np.isnan(curve.mean))
        if not len(is_there):
            return
        if band:
            self._fill(is_there, self._rows(curve.greatest[is_there]), self._rows(curve.least[is_there]), band)
        rows = self._rows(curve.mean[is_there])
        columns = np.arange(is_there[0], is_there[-1] + 1)
        between = np.rint(np.interp(columns, is_there, rows)).astype(int)
        after = np.append(between[1:], between[-1])  # down or up to where the next column goes on
        reach = np.where(after > between, after - 1, np.where(after < between, after + 1, between))
        self._fill(columns, np.minimum(between, reach), np.maximum(between, reach), style)

    def lines(self) -> list[Text]:
        """Row by row."""
        found = []
        for dots, styles in zip(self._dots, self._styles, strict=True):
            line = Text(no_wrap=True, end="")
            for bits, style in zip(dots.tolist(), styles.tolist(), strict=True):
                line.append((("*" if self.plain else chr(BRAILLE + bits)) if bits else " "), style)
            found.append(line)
        return found

    def _rows(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        heights = np.log(values) if self._is_log else values
        share = (self._high - heights) / ((self._high - self._low) or 1.0)
        most = self.height * self.down - 1
        rows: NDArray[np.int64] = np.clip(np.rint(share * most), 0, most).astype(np.int64)
        return rows

    def _fill(self, columns: NDArray[np.int64], top: NDArray[np.int64], bottom: NDArray[np.int64], style: str) -> None:
        dots = np.zeros((self.height * self.down, self.columns), bool)
        rows = np.arange(len(dots))[:, None]
        dots[:, columns] = (rows >= top) & (rows <= bottom)
        cells = dots.reshape(self.height, self.down, self.width, self.across)
        bits = (cells * (np.ones((1, 1), int) if self.plain else DOTS)[:, None, :]).sum((1, 3))
        self._dots = np.where(bits > 0, bits, self._dots)
        self._styles = np.where(bits > 0, style, self._styles)
