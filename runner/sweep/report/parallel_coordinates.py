"""The page's parallel coordinates: one axis for each key, one line for each job, the goals at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.sweep.report import number_format
from runner.sweep.report.figures import Figure, packed, plain, shade
from runner.sweep.report.report import Report
from runner.sweep.report.results import Result

MOST_KEYS = 10  # more axes than that can't be read
MOST_LINES = 300
FEW = 6  # so many numbers or fewer stand as words, evenly spaced
POINTS_OF_BEND = 14
PIXELS_OF_AXIS = 105


@dataclass(frozen=True)
class Axis:
    """One vertical axis: where a job's value lies on it, from 0 to 1, and what is written beside it."""

    title: str
    place: Callable[[Result], float | None]
    ticks: list[tuple[float, str]]


def draw_parallel(report: Report) -> list[Figure]:
    """[] for fewer than two keys that differ, or fewer than two jobs with a value."""
    goals = [goal.metric for goal in report.goals]
    judged = [each for each in report.results if each.state in ("finished", "pruned")]
    shown = [each for each in judged if goals and all(_finite(each.value(name)) for name in goals)][:MOST_LINES]
    keys = [key for key in report.keys if len({each.keys.get(key) for each in shown}) > 1]
    if len(keys) < 2 or len(shown) < 2:
        return []
    axes = [_key_axis(key, shown) for key in keys[:MOST_KEYS]]
    axes += [_goal_axis(name, shown) for name in goals]
    data = [_line(result, axes, rank, len(shown), report) for rank, result in enumerate(shown)]
    layout = {
        "xaxis": {"visible": False, "range": [-0.15, len(axes) - 0.55], "fixedrange": True},
        "yaxis": {"visible": False, "range": [-0.06, 1.06], "fixedrange": True},
        "shapes": [_rule(number) for number in range(len(axes))],
        "annotations": [note for number, axis in enumerate(axes) for note in _words(number, axis)],
        "margin": {"t": 46, "l": 24, "b": 12, "r": 12},
        "height": 420,
    }
    left = f"; {len(keys) - MOST_KEYS} more keys are in report.csv" if len(keys) > MOST_KEYS else ""
    note = f"A line is a job, from its keys to what it reached; the bluer, the better{left}."
    return [Figure("parallel", "Keys and what they reached", data[::-1], layout, note, PIXELS_OF_AXIS * len(axes))]


def _line(result: Result, axes: Sequence[Axis], rank: int, count: int, report: Report) -> dict[str, Any]:
    is_best = result is report.best
    reached = ", ".join(f"{goal.metric} {number_format.value(result.value(goal.metric))}" for goal in report.goals)
    text = f"<b>{result.job}</b>  {plain(result.name)}<br>{plain(reached)}"
    spread = (rank / max(1, count - 1) - 0.5) * 0.02  # jobs with the same value stay apart by a hair
    places = [axis.place(result) for axis in axes]
    return {
        **_bent([(number, place + spread) for number, place in enumerate(places) if place is not None]),
        "mode": "lines",
        "line": {"color": shade(rank / max(1, count - 1)), "width": 3 if is_best else 1.4},
        "opacity": 1 if is_best else 0.35 if result.state == "pruned" else 0.7,
        "text": text,
        "name": "",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _bent(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """A smooth line through the points that is level at each of them, and so never leaves the axes' range."""
    numbers = np.array([number for number, _ in points], dtype=np.float64)
    heights = np.array([height for _, height in points], dtype=np.float64)
    part = np.linspace(0, 1, POINTS_OF_BEND, endpoint=False)
    x = np.append((numbers[:-1, None] + np.diff(numbers)[:, None] * part).ravel(), numbers[-1])
    y = np.append((heights[:-1, None] + np.diff(heights)[:, None] * part**2 * (3 - 2 * part)).ravel(), heights[-1])
    return {"x": packed(x), "y": packed(y)}


def _key_axis(key: str, shown: Sequence[Result]) -> Axis:
    words = sorted({result.keys[key] for result in shown if key in result.keys})
    numbers = {word: number for word in words if (number := _number(word)) is not None}
    title = key.rpartition(".")[2]
    if len(numbers) == len(words) and len(set(numbers.values())) > FEW:
        return _number_axis(title, list(numbers.values()), lambda result: numbers.get(result.keys.get(key, "")))
    words.sort(key=lambda word: (numbers.get(word, math.inf), word))
    step = 1 / max(1, len(words) - 1)
    places = {word: place * step for place, word in enumerate(words)}
    stride = math.ceil(len(words) / 12)
    ticks = [(place, word) for word, place in places.items()][::stride]
    return Axis(title, lambda result: places.get(result.keys.get(key, "")), ticks)


def _goal_axis(name: str, shown: Sequence[Result]) -> Axis:
    values = [value for result in shown if (value := result.value(name)) is not None]
    return _number_axis(name, values, lambda result: result.value(name))


def _number_axis(title: str, values: Sequence[float], value: Callable[[Result], float | None]) -> Axis:
    """Logarithmic where the values are positive and far apart."""
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= 30

    def place(number: float) -> float:
        if low == high:
            return 0.5
        return math.log(number / low) / math.log(high / low) if is_log else (number - low) / (high - low)

    def place_of(result: Result) -> float | None:
        found = value(result)
        return None if found is None else place(found)

    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    marks = sorted({low, middle, high})
    return Axis(title, place_of, [(place(mark), f"{mark:.3g}") for mark in marks])


def _rule(number: int) -> dict[str, Any]:
    line = {"color": "var(--line)", "width": 1}
    return {"type": "line", "x0": number, "x1": number, "y0": -0.02, "y1": 1.02, "line": line, "layer": "below"}


def _words(number: int, axis: Axis) -> list[dict[str, Any]]:
    plainly = {"showarrow": False, "x": number, "bgcolor": "var(--veil)", "borderpad": 1}
    title = {"y": 1.03, "yanchor": "bottom", "yshift": 8, "text": f"<b>{_short(axis.title, 16)}</b>", **plainly}
    small = {"size": 11.5, "color": "var(--text)"}
    ticks = [
        {"y": y, "xanchor": "left", "xshift": 5, "text": _short(text, 14), "font": small} for y, text in axis.ticks
    ]
    return [title, *({**plainly, **tick} for tick in ticks)]


def _short(text: str, most: int) -> str:
    return plain(text if len(text) <= most else text[: most - 1] + "…")


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
