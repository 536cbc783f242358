"""The page's plots as plain dicts for plotly.js: curves, a search's course, what each key does."""

from __future__ import annotations

import base64
import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.sweep.report.ranking import Goal
from runner.sweep.report.report import Report
from runner.sweep.report.results import LOSS, Curve, Result

NUM_COLORS = 10  # of the page's palette, --c0 to --c9
MOST_CURVES = 200  # SVG stays quick up to here; the best ones are drawn
GOOD, MIDDLE, BAD = (33, 118, 199), (128, 146, 168), (206, 158, 110)  # seen on white and on black


@dataclass(frozen=True)
class Figure:
    """One plot. A color may be var(--name): the page puts its theme's in."""

    name: str  # its id on the page
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""
    least_width: int = 0  # pixels; on a narrower screen it scrolls


def draw_curves(report: Report) -> list[Figure]:
    """The training loss and each goal's metric by step, a line for each job, the best one on top."""
    results = with_curves(report)
    colors = job_colors(report)
    names = list(dict.fromkeys([LOSS, *(goal.metric for goal in report.goals)]))
    figures: list[Figure] = []
    for name in names:
        shown = [result for result in results if name in result.curves]
        if any(len(result.curves[name].steps) > 1 for result in shown):
            lines = [_line(each, each.curves[name], colors[each.job], is_best=each is report.best) for each in shown]
            axis = _value_axis(name, np.concatenate([result.curves[name].values for result in shown]))
            layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": axis, "height": 380}
            figures.append(Figure(f"curve-{len(figures)}", name, lines[::-1], layout))
    return figures


def draw_search(report: Report) -> list[Figure]:
    """Of a search: its values by trial with the best so far; of two goals: one against the other."""
    if not report.objectives:
        return []
    if len(report.goals) > 1:
        return [_front(report, report.goals[0], report.goals[1])]
    goal = report.goals[0]
    by_number = sorted(report.results, key=lambda result: result.job)
    whole = [each for each in by_number if each.state == "finished" and each.value(goal.metric) is not None]
    pruned = [each for each in by_number if each.state == "pruned" and each.value(goal.metric) is not None]
    if not whole:
        return []
    better = np.minimum if goal.mode == "min" else np.maximum
    so_far = better.accumulate(np.array([each.value(goal.metric) for each in whole], dtype=np.float64))
    line = {
        "x": [each.job for each in whole],
        "y": _listed(so_far),
        "mode": "lines",
        "line": {"shape": "hv", "width": 2, "color": "var(--accent)"},
        "name": "best so far",
        "hoverinfo": "skip",
    }
    data = [line, _dots(whole, goal, "finished", "circle"), _dots(pruned, goal, "pruned", "x-thin")]
    values = np.array([each.value(goal.metric) for each in (*whole, *pruned)], dtype=np.float64)
    axis = _value_axis(goal.metric, values)
    layout = {"xaxis": {"title": {"text": "trial"}}, "yaxis": axis, "showlegend": True, "height": 360}
    return [Figure("history", "The search's course", [trace for trace in data if trace["x"]], layout)]


def with_curves(report: Report) -> list[Result]:
    """The jobs whose curves are drawn, best first."""
    return [result for result in report.results if result.curves][:MOST_CURVES]


def job_colors(report: Report) -> dict[int, str]:
    """Up to NUM_COLORS jobs or groups of seeds get a color each; more are shaded by their rank."""
    results = with_curves(report)
    groups = {job: number for number, group in enumerate(report.seeds) for job in group.jobs}
    if len(results) <= NUM_COLORS:
        return {result.job: f"var(--c{rank})" for rank, result in enumerate(results)}
    if report.seeds and len(report.seeds) <= NUM_COLORS:
        return {each.job: f"var(--c{groups[each.job]})" if each.job in groups else "var(--muted)" for each in results}
    return {result.job: shade(rank / (len(results) - 1)) for rank, result in enumerate(results)}


def shade(part: float) -> str:
    """From the best, 0, to the worst, 1."""
    one, other, share = (GOOD, MIDDLE, part * 2) if part < 0.5 else (MIDDLE, BAD, part * 2 - 1)
    mixed = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return f"rgb({','.join(map(str, mixed))})"


def plain(text: str, *, width: int = 52, most: int = 200) -> str:
    """A person's text as plotly shows it: its own few tags do nothing, long lines wrap, what is huge is cut."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(cut, width))


def packed(values: NDArray[Any]) -> dict[str, str]:
    """An array as plotly.js reads it: half as long as its digits. float32 and int32 are enough for a screen."""
    is_whole = np.issubdtype(values.dtype, np.integer)
    data = values.astype("<i4" if is_whole else "<f4").tobytes()
    return {"dtype": "i4" if is_whole else "f4", "bdata": base64.b64encode(data).decode()}


def _line(result: Result, curve: Curve, color: str, *, is_best: bool) -> dict[str, Any]:
    few = len(curve.steps) < 40
    return {
        "x": packed(curve.steps),
        "y": packed(curve.values),
        "mode": "lines+markers" if few else "lines",
        "marker": {"size": 4},
        "line": {"color": color, "width": 2.6 if is_best else 1.2},
        "opacity": 1 if is_best else 0.75,
        "name": plain(result.name),
        "meta": {"job": result.job},
        "hovertemplate": f"<b>{result.job}</b>  %{{fullData.name}}<br>step %{{x:,}}: %{{y:.5g}}<extra></extra>",
    }


def _dots(results: Sequence[Result], goal: Goal, name: str, symbol: str) -> dict[str, Any]:
    is_whole = name == "finished"
    color = "var(--accent)" if is_whole else "var(--muted)"
    return {
        "x": [result.job for result in results],
        "y": _listed([result.value(goal.metric) for result in results]),
        "text": [plain(result.name) for result in results],
        "mode": "markers",
        "name": name,
        "marker": {
            "symbol": symbol,
            "size": 7,
            "color": color,
            "opacity": 0.8,
            "line": {"width": 1.6 * (not is_whole), "color": color},
        },
        "hovertemplate": f"<b>%{{x}}</b>  %{{text}}<br>%{{y:.5g}}, {name}<extra></extra>",
    }


def _front(report: Report, one: Goal, other: Goal) -> Figure:
    """Two goals against each other; a job that none beats is filled."""
    data = []
    for name, is_front in (("beaten by another job", False), ("on the Pareto front", True)):
        shown = [each for each in report.results if each.state == "finished" and (each.job in report.front) == is_front]
        shown.sort(key=lambda result: result.value(one.metric) or 0.0)
        data.append(
            {
                "x": _listed([each.value(one.metric) for each in shown]),
                "y": _listed([each.value(other.metric) for each in shown]),
                "text": [f"<b>{each.job}</b>  {plain(each.name)}" for each in shown],
                "mode": "lines+markers" if is_front else "markers",
                "name": name,
                "line": {"shape": "linear", "width": 1.5, "dash": "dot", "color": "var(--accent)"},
                "marker": {"size": 9 if is_front else 7, "color": "var(--accent)" if is_front else "var(--muted)"},
                "hovertemplate": "%{text}<br>%{x:.5g}, %{y:.5g}<extra></extra>",
            }
        )
    axes = {axis: {"title": {"text": plain(goal.metric)}} for axis, goal in (("xaxis", one), ("yaxis", other))}
    return Figure("front", "One goal against the other", data, {**axes, "showlegend": True, "height": 400})


def _value_axis(name: str, values: NDArray[np.float64]) -> dict[str, Any]:
    """A loss over more than a decade is read on a log axis."""
    values = values[np.isfinite(values)]
    spread = values.max() / values.min() if len(values) and values.min() > 0 else 1.0
    title = {"title": {"text": plain(name)}}
    if spread <= 10 or "loss" not in name:
        return title
    return {**title, "type": "log", "dtick": "D2" if spread < 1000 else 1}


def _listed(values: Sequence[float | None] | NDArray[np.float64]) -> list[float | None]:
    """For JSON: what isn't finite is a gap."""
    return [None if value is None or not math.isfinite(value) else float(value) for value in values]
