"""Choose which of a run's points go to MLflow, at most `tracking.points` per metric; the journal keeps all.

Of each stretch of a metric's points, the minimum, the maximum and the last are sent, so that a spike of one step is kept;
and the first and the last of all. The choice depends only on the journal, so that sending it again, after a kill or from
another machine, sends the same points. The state between two calls is a dictionary in the Ack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.tracking.journal_records import Points, Record

#: share of the remaining points for the planned steps; a run may be resumed for more
PLANNED_SHARE = 0.75
#: share of these for stretches that grow with the run, so that a run that ends early shows its beginning
EARLY = 0.4
PER_STRETCH = 3  # points at most
#: share of `tracking.points` that stops don't use: each stop sends the waiting points
END_SHARE = 0.25
#: for unplanned steps: 1 part of the remaining points, and 3 each time the run grows e-fold; enough for a factor of 10**5
UNKNOWN = 40
LONGEST = 2**53
EVERY_STEP = "train/"  # the metrics that have a point for each step

#: name, time, step, value
Chosen = list[tuple[str, int, int, float]]


def begin(before: Mapping[str, Any], plan: Mapping[str, int | None] | None) -> dict[str, Any]:
    """Return the state when a run starts or resumes.

    Args:
        before: The state before, {} at the first start.
        plan: Of the run's start: `most` points per metric, and how many points a per-step metric has at the end
            (`expected`). None: all points are sent, without a state.
    """
    if plan is None or plan["most"] is None:
        return {}
    state = {"most": plan["most"], "expected": plan.get("expected"), "left_out": before.get("left_out", 0)}
    if all(before.get(key) == state[key] for key in ("most", "expected")):  # it is resumed with the same plan
        return {**state, "series": before["series"]}
    state["series"] = {name: _expecting(name, one, state) for name, one in before.get("series", {}).items()}
    return state


def size(state: Mapping[str, Any], record: Record) -> int:
    """Return about how many points of a record are chosen."""
    if not isinstance(record.data, Points) or not state:
        return record.num_points
    rows, series = len(record.data.steps), state["series"]
    widths = [series[name]["width"] if name in series else 1 for name in record.data.names]
    return sum(rows if width == 1 else min(rows, PER_STRETCH * (1 + rows // width)) for width in widths)


def choose(state: Mapping[str, Any], records: Iterable[Record]) -> tuple[Chosen, dict[str, Any]]:
    """Return the points of some records to send now, in the order of writing, and the state after them."""
    if not state:
        return _all(records), {}
    state = {**state, "series": {name: dict(one) for name, one in state["series"].items()}}
    chosen: list[tuple[int, int, str, int, int, float]] = []
    num_points = row = 0
    for record in records:
        rows = record.data
        if not isinstance(rows, Points):
            continue
        for column, name in enumerate(rows.names):
            series = state["series"].get(name)
            if series is None:
                new = {"seen": 0, "sent": 0, "num": 0, "open": [], "width": 1, "stretch": 1}
                series = state["series"][name] = _expecting(name, new, state)
            found = _of_series(series, rows.steps, rows.times_ms, rows.values[:, column], most=state["most"])
            chosen += [(row + at, column, name, time_ms, step, value) for at, time_ms, step, value in found]
        num_points += record.num_points
        row += len(rows.steps)
    chosen.sort(key=lambda point: point[:2])
    state["left_out"] += num_points - len(chosen)
    return [point[2:] for point in chosen], state


def _all(records: Iterable[Record]) -> Chosen:
    chosen: Chosen = []
    for record in records:
        if isinstance(rows := record.data, Points):
            columns = zip(rows.steps.tolist(), rows.times_ms.tolist(), rows.values.tolist(), strict=True)
            for step, time_ms, values in columns:
                chosen += [(name, time_ms, step, value) for name, value in zip(rows.names, values, strict=True)]
    return chosen


def close(state: Mapping[str, Any], *, is_over: bool) -> tuple[Chosen, dict[str, Any]]:
    """Return the points of unfinished stretches when a run ends. is_over: False for a stop, after which it may be resumed."""
    kept = 0 if is_over else int(END_SHARE * state["most"])
    chosen: Chosen = []
    series = {}
    for name, one in state["series"].items():
        waiting, room = _by_step(one["open"]), state["most"] - one["sent"]
        if room - len(waiting) < kept:
            series[name] = one
            continue
        waiting = waiting[-room:] if room else []
        chosen += [(name, time_ms, step, value) for step, time_ms, value in waiting]
        series[name] = {**one, "open": [], "num": 0, "sent": one["sent"] + len(waiting)}
    return chosen, {**state, "series": series, "left_out": state["left_out"] - len(chosen)}


def _expecting(name: str, series: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    share = max(0, int(PLANNED_SHARE * (state["most"] - series["sent"])))
    changes = {"limit": series["sent"] + share, "base": series["seen"], "scale": 0, "stretch": 1}
    if series["num"] and state["most"] - series["sent"] >= 2 * PER_STRETCH:
        # an unfinished stretch has the width of the former plan
        changes["width"] = min(series["width"], series["num"] + 1)
    if name.startswith(EVERY_STEP) and state["expected"] is not None:
        to_come = state["expected"] - series["seen"]
        if to_come > share:
            stretch = -(-PER_STRETCH * to_come // max(1, int((1 - EARLY) * share)))
            # stretches of 1/scale of the run so far take scale * (1 + 3 ln(stretch)) points until they are that long
            changes["scale"] = max(1, int(EARLY * share / (1 + PER_STRETCH * math.log(stretch))))
            changes["stretch"] = min(LONGEST, stretch)
    return {**series, **changes}


def _width(series: Mapping[str, Any]) -> int:
    stretch: int = series["stretch"]
    return max(1, min(stretch, (series["seen"] - series["base"]) // series["scale"])) if series["scale"] else stretch


def _of_series(
    series: dict[str, Any], steps: NDArray[Any], times_ms: NDArray[Any], values: NDArray[Any], *, most: int
) -> list[tuple[int, int, int, float]]:
    found: list[tuple[int, int, int, float]] = []
    at = 0
    while at < len(steps):
        begin = at
        if not series["num"]:
            if series["sent"] >= series["limit"]:  # more points than planned
                scale = max(1, (most - series["sent"]) // UNKNOWN)
                series |= {"limit": most, "base": 0, "scale": scale, "stretch": LONGEST}
            is_full = most - series["sent"] < 2 * PER_STRETCH  # the rest is for the end
            series["width"] = LONGEST if is_full else _width(series)
        if series["width"] == 1 or not series["sent"]:  # the first point is sent at once
            room = series["limit"] - series["sent"]
            if series["scale"]:
                room = min(room, 2 * series["scale"] - (series["seen"] - series["base"]))
            at = min(len(steps), at + (max(1, room) if series["width"] == 1 else 1))
            now = slice(begin, at)
            found += zip(
                range(begin, at), times_ms[now].tolist(), steps[now].tolist(), values[now].tolist(), strict=True
            )
            series["sent"] += at - begin
        else:
            at = min(len(steps), at + series["width"] - series["num"])
            marked = [
                [int(steps[place]), int(times_ms[place]), float(values[place]), place]
                for place in _marked(values[begin:at], begin)
            ]
            series["open"] = _extremes([[*point[:3], -1] for point in series["open"]], marked)
            series["num"] += at - begin
            if series["num"] >= series["width"]:
                ready = _by_step(series["open"])
                found += [(place, time_ms, step, value) for step, time_ms, value, place in ready]
                series["sent"] += len(ready)
                series["num"], series["open"] = 0, []
            else:
                series["open"] = [point[:3] for point in series["open"]]
        series["seen"] += at - begin
    return found


def _marked(part: NDArray[Any], begin: int) -> list[int]:
    is_nan = np.isnan(part)
    if is_nan.all():
        return [begin, begin, begin + len(part) - 1]
    least, greatest = np.where(is_nan, np.inf, part).argmin(), np.where(is_nan, -np.inf, part).argmax()
    others = [int(is_nan.argmax())] if is_nan.any() else []
    return [begin + place for place in (int(least), int(greatest), len(part) - 1, *others)]


def _extremes(before: list[list[Any]], now: list[list[Any]]) -> list[list[Any]]:
    if not before:
        return now
    least = now[0] if now[0][2] < before[0][2] or math.isnan(before[0][2]) > math.isnan(now[0][2]) else before[0]
    greatest = now[1] if now[1][2] > before[1][2] or math.isnan(before[1][2]) > math.isnan(now[1][2]) else before[1]
    nans = [point for point in (*before, *now) if math.isnan(point[2])]
    return [least, greatest, now[2], *sorted(nans, key=lambda point: point[0])[:1]]


def _by_step(points: Sequence[list[Any]]) -> list[list[Any]]:
    once = {(point[0], point[1], repr(point[2])): point for point in points}
    return sorted(once.values(), key=lambda point: point[:2])
