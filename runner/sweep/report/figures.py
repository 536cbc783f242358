"""The page's plots: curves, the trials of a search, and values by key. Imports plotly: half a second."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.sweep.report.report import Report, Seeds
from runner.sweep.report.results import LOSS, JobResult

#: visible on white and on black, as the page has both
COLORS = ("#3f7fc4", "#d9772b", "#3d9a6a", "#c0577b", "#8b74c0", "#9a7650", "#c2991f", "#43a0b5", "#858d94", "#93a13a")
ACCENT, MUTED = COLORS[0], COLORS[8]
SHADES = ("rgb(33,118,199)", "rgb(128,146,168)", "rgb(206,158,110)")  # from the best to the worst
THEME = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12.5, "color": MUTED},
    "margin": {"l": 56, "r": 18, "t": 14, "b": 46},
    "hovermode": "closest",
    "hoverlabel": {"align": "left"},
    "showlegend": False,
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    "height": 380,
}
AXIS = {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False, "automargin": True, "title": {"standoff": 12}}
MAX_CURVES = 200  # of the best jobs: more would make the SVG slow
MIN_BAND_SIZE, MAX_BANDS = 3, 12  # seeds of a group; groups
MAX_KEYS, COLUMNS = 12, 3  # panels of keys
FEW = 6  # numbers that are evenly spaced


@dataclass(frozen=True)
class Figure:
    """One plot."""

    name: str  # its id on the page
    title: str
    plot: Any  # plotly.graph_objects.Figure
    note: str = ""


def draw(report: Report) -> dict[str, list[Figure]]:
    """Return the plots by the section of the page, in its order."""
    return {"Search": draw_search(report), "Keys": draw_keys(report), "Curves": draw_curves(report)}


def draw_curves(report: Report) -> list[Figure]:
    """Draw the training loss and each goal's metric by step, a line for each job, the best one on top.

    For groups of seeds, draw the median and the quartiles, with thin lines of the jobs.
    """
    colors, results = job_colors(report), with_curves(report)
    groups = [group for group in report.seeds if len(group.jobs) >= MIN_BAND_SIZE][:MAX_BANDS]
    banded = {job for group in groups for job in group.jobs}
    figures: list[Figure] = []
    for name in dict.fromkeys([LOSS, *(goal.metric for goal in report.goals)]):
        shown = [each for each in results if name in each.curves]
        if any(len(each.curves[name].steps) > 1 for each in shown):
            traces = []
            for each in shown[::-1]:
                trace = _curve(each, name, colors[each.job])
                if each.job in banded:
                    trace |= {"opacity": 0.3, "mode": "lines", "line": {**trace["line"], "width": 0.8}}
                elif report.best and each.job == report.best.job:
                    trace |= {"opacity": 1, "line": {**trace["line"], "width": 2.6}}
                traces.append(trace)
            traces += [trace for group in groups for trace in _band(group, shown, name, colors)]
            axis = _value_axis(name, np.concatenate([each.curves[name].values for each in shown]))
            figures.append(_figure(f"curve-{len(figures)}", name, traces, xaxis_title_text="step", yaxis=axis))
    return figures


def draw_search(report: Report) -> list[Figure]:
    """Draw a search's values by trial with the best so far; for two objectives, one against the other."""
    if not report.objectives:
        return []
    finished, pruned = ([each for each in report.results if each.state == state] for state in ("finished", "pruned"))
    if len(report.goals) > 1:
        one, other = (goal.metric for goal in report.goals[:2])
        front = sorted((each for each in finished if each.job in report.front), key=lambda each: each.value(one) or 0.0)
        rest = [each for each in finished if each.job not in report.front]
        line = {"mode": "lines+markers", "line": {"width": 1.5, "dash": "dot"}, "marker": {"size": 9, "color": ACCENT}}
        traces = [
            _dots(rest, one, other, name="beaten by another job", marker={"size": 7, "color": MUTED}),
            _dots(front, one, other, name="on the Pareto front", **line),
        ]
        layout: dict[str, Any] = {"xaxis_title_text": plain(one), "yaxis_title_text": plain(other)}
        return [_figure("front", "One goal against the other", traces, showlegend=True, **layout)]
    (goal,) = report.goals
    finished, pruned = (
        sorted((each for each in results if each.value(goal.metric) is not None), key=lambda each: each.job)
        for results in (finished, pruned)
    )
    if not finished:
        return []
    values = np.array([each.value(goal.metric) for each in (*finished, *pruned)], dtype=np.float64)
    best = (np.minimum if goal.mode == "min" else np.maximum).accumulate(values[: len(finished)])
    course = {"x": [each.job for each in finished], "y": best.tolist(), "mode": "lines", "hoverinfo": "skip"}
    traces = [
        {**course, "name": "best so far", "line": {"shape": "hv", "width": 2, "color": ACCENT}},
        _dots(finished, "job", goal.metric, name="finished", marker={"size": 7, "color": ACCENT}),
        _dots(pruned, "job", goal.metric, name="pruned", marker={"size": 7, "color": MUTED, "symbol": "x"}),
    ]
    layout = {"xaxis_title_text": "trial", "yaxis": _value_axis(goal.metric, values)}
    return [
        _figure("history", "The search's course", [each for each in traces if each["x"]], showlegend=True, **layout)
    ]


def draw_keys(report: Report) -> list[Figure]:
    """Draw the first objective by each key that differs, a dot per job; [] without such a key."""
    from plotly.subplots import make_subplots  # heavy

    metric = report.goals[0].metric if report.goals else ""
    judged = [each for each in report.results if each.state in ("finished", "pruned")]
    shown = [each for each in judged if (value := each.value(metric)) is not None and math.isfinite(value)]
    keys = [key for key in report.keys if len({each.keys.get(key) for each in shown}) > 1]
    if not keys:
        return []
    drawn = keys[:MAX_KEYS]
    num_rows = -(-len(drawn) // COLUMNS)
    plot = make_subplots(num_rows, COLUMNS, shared_yaxes=True, subplot_titles=[plain(key, most=40) for key in drawn])
    for number, key in enumerate(drawn):
        panel = {"row": number // COLUMNS + 1, "col": number % COLUMNS + 1}
        texts = [plain(each.keys.get(key, ""), most=24) or "–" for each in shown]
        dots = _dots(shown, "job", metric, marker={"size": 7, "color": ACCENT, "opacity": 0.6})
        plot.add_scatter(**dots | {"x": texts}, **panel)
        plot.update_xaxes(_key_axis(texts), **panel)
    plot.update_yaxes(_value_axis(metric, np.array([each.value(metric) for each in shown])), col=1)
    left = f" {len(keys) - MAX_KEYS} more keys are in report.csv." if len(keys) > MAX_KEYS else ""
    note = f"A dot is a job: {metric} by the value of each key.{left}"
    return [_figure("keys", "Keys and what they reached", plot, note, height=90 + 260 * num_rows, margin_t=36)]


def with_curves(report: Report) -> list[JobResult]:
    """The jobs whose curves are drawn, best first."""
    return [result for result in report.results if result.curves][:MAX_CURVES]


def job_colors(report: Report) -> dict[int, str]:
    """Return a color per job or group of seeds if there are few, else shades by rank."""
    from plotly.colors import sample_colorscale  # heavy

    results = with_curves(report)
    groups = {job: number for number, group in enumerate(report.seeds) for job in group.jobs}
    if len(results) <= len(COLORS):
        return {result.job: COLORS[rank] for rank, result in enumerate(results)}
    if report.seeds and len(report.seeds) <= len(COLORS):
        return {each.job: COLORS[groups[each.job]] if each.job in groups else MUTED for each in results}
    shades = sample_colorscale(SHADES, np.linspace(0, 1, len(results)))
    return {result.job: shade for result, shade in zip(results, shades, strict=True)}


def plain(text: str, *, width: int = 52, most: int = 200) -> str:
    """Return a text for plotly: without effect of its tags, with wrapped lines, and cut if it is huge."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(cut, width))


def _figure(name: str, title: str, traces: Any, note: str = "", **layout: Any) -> Figure:
    from plotly import graph_objects  # heavy

    plot = graph_objects.Figure(traces).update_layout(THEME).update_xaxes(AXIS).update_yaxes(AXIS)
    return Figure(name, title, plot.update_layout(**layout), note)


def _curve(result: JobResult, name: str, color: str) -> dict[str, Any]:
    curve = result.curves[name]
    return {
        "x": curve.steps.astype(np.int32),  # half as long on the page, and enough for a screen
        "y": curve.values.astype(np.float32),
        "mode": "lines+markers" if len(curve.steps) < 40 else "lines",
        "marker": {"size": 4},
        "line": {"color": color, "width": 1.2},
        "opacity": 0.75,
        "name": plain(result.name),
        "meta": {"job": result.job},
        "hovertemplate": f"<b>{result.job}</b>  %{{fullData.name}}<br>step %{{x:,}}: %{{y:.5g}}<extra></extra>",
    }


def _band(group: Seeds, shown: Sequence[JobResult], name: str, colors: dict[int, str]) -> list[dict[str, Any]]:
    results = [each for each in shown if each.job in group.jobs]
    if len(results) < MIN_BAND_SIZE:
        return []
    curves = [each.curves[name] for each in results]
    steps = max((curve.steps for curve in curves), key=lambda steps: int(steps[-1]))
    values = np.array([np.interp(steps, curve.steps, curve.values, right=np.nan) for curve in curves])
    is_known = np.isfinite(values).any(0)
    steps = steps[is_known].astype(np.int32)
    low, median, high = np.nanquantile(values[:, is_known], (0.25, 0.5, 0.75), axis=0).astype(np.float32)
    unit, color = "runs" if group.num_folds > 1 else "seeds", colors[results[0].job]
    both: dict[str, Any] = {"meta": {"jobs": list(group.jobs)}, "name": f"{plain(group.name)}, {len(results)} {unit}"}
    area = {"x": np.concatenate([steps, steps[::-1]]), "y": np.concatenate([high, low[::-1]]), "mode": "none"}
    area |= {"fill": "toself", "fillcolor": color, "opacity": 0.18, "hoverinfo": "skip"}
    line = {"x": steps, "y": median, "mode": "lines", "line": {"color": color, "width": 2.4}}
    hover = "<b>%{fullData.name}</b><br>step %{x:,}: median %{y:.5g}<extra></extra>"
    return [{**both, **area}, {**both, **line, "hovertemplate": hover}]  # visible as long as one of the jobs is


def _dots(results: Sequence[JobResult], x: str, y: str, **look: Any) -> dict[str, Any]:
    return {
        "x": [result.job if x == "job" else result.value(x) for result in results],
        "y": [result.value(y) for result in results],
        "text": [f"<b>{result.job}</b>  {plain(result.name)}" for result in results],
        "mode": "markers",
        "hovertemplate": f"%{{text}}<br>{'' if x == 'job' else '%{x:.5g}, '}%{{y:.5g}}<extra></extra>",
        **look,
    }


def _value_axis(name: str, values: np.ndarray[Any, Any]) -> dict[str, Any]:
    values = values[np.isfinite(values)]
    spread = values.max() / values.min() if len(values) and values.min() > 0 else 1.0
    title = {"title_text": plain(name)}
    if spread <= 10 or "loss" not in name:
        return title
    return {**title, "type": "log", "dtick": "D2" if spread < 1000 else 1, "tickformat": "~g"}


def _key_axis(texts: Sequence[str]) -> dict[str, Any]:
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        numbers = {}
    if len(numbers) > FEW and all(map(math.isfinite, numbers.values())):
        low, high = min(numbers.values()), max(numbers.values())
        return {"type": "log" if low > 0 and high / low >= 30 else "linear", "exponentformat": "power"}
    order = sorted(set(texts), key=lambda text: (numbers.get(text, 0), text))
    return {"type": "category", "categoryorder": "array", "categoryarray": order}
