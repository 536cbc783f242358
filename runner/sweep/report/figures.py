"""The page's plots: curves, a search's course, what its keys did. Imports plotly: half a second."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.sweep.report import number_format
from runner.sweep.report.report import Report
from runner.sweep.report.results import LOSS, Result
from runner.sweep.report.seeds import Seeds

#: seen on white and on black, as all that follows: the page has both
COLORS = ("#3f7fc4", "#d9772b", "#3d9a6a", "#c0577b", "#8b74c0", "#9a7650", "#c2991f", "#43a0b5", "#858d94", "#93a13a")
ACCENT, MUTED = COLORS[0], COLORS[8]
GOOD, MIDDLE, BAD = (33, 118, 199), (128, 146, 168), (206, 158, 110)
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
MOST_CURVES = 200  # SVG stays quick up to here; the best ones are drawn
LEAST_OF_A_BAND, MOST_BANDS = 3, 12  # seeds of a group; groups
MOST_KEYS, MOST_LINES = 10, 300  # of the parallel coordinates: more can't be read
FEW = 6  # so many numbers or fewer stand as words, evenly spaced


@dataclass(frozen=True)
class Figure:
    """One plot."""

    name: str  # its id on the page
    title: str
    plot: Any  # plotly.graph_objects.Figure
    note: str = ""


def draw_curves(report: Report) -> list[Figure]:
    """The training loss and each goal's metric by step, a line for each job, the best one on top.

    Of groups of seeds the median and the quartiles over them, with the jobs' own lines thin behind.
    """
    colors = job_colors(report)
    groups = [group for group in report.seeds if len(group.jobs) >= LEAST_OF_A_BAND][:MOST_BANDS]
    banded = {job for group in groups for job in group.jobs}
    figures: list[Figure] = []
    for name in dict.fromkeys([LOSS, *(goal.metric for goal in report.goals)]):
        shown = [each for each in with_curves(report) if name in each.curves]
        if any(len(each.curves[name].steps) > 1 for each in shown):
            lines = [
                _curve(each, name, colors[each.job], is_best=each is report.best, is_behind=each.job in banded)
                for each in shown
            ]
            bands = [trace for group in groups for trace in _band(group, shown, name, colors)]
            axis = _value_axis(name, np.concatenate([each.curves[name].values for each in shown]))
            figures.append(
                _figure(f"curve-{len(figures)}", name, lines[::-1] + bands, xaxis_title_text="step", yaxis=axis)
            )
    return figures


def draw_search(report: Report) -> list[Figure]:
    """Of a search: its values by trial with the best so far; of two goals: one against the other."""
    if not report.objectives:
        return []
    if len(report.goals) > 1:
        return [_front(report)]
    (goal,) = report.goals
    by_number = sorted(report.results, key=lambda result: result.job)
    known = [each for each in by_number if each.value(goal.metric) is not None]
    whole, pruned = ([each for each in known if each.state == state] for state in ("finished", "pruned"))
    if not whole:
        return []
    better = np.minimum if goal.mode == "min" else np.maximum
    best = better.accumulate(np.array([each.value(goal.metric) for each in whole], dtype=np.float64))
    line = {
        "x": [each.job for each in whole],
        "y": best.tolist(),
        "mode": "lines",
        "name": "best so far",
        "hoverinfo": "skip",
    }
    data = [
        {**line, "line": {"shape": "hv", "width": 2, "color": ACCENT}},
        _dots(whole, "job", goal.metric, name="finished", marker={"size": 7, "color": ACCENT}),
        _dots(pruned, "job", goal.metric, name="pruned", marker={"size": 7, "color": MUTED, "symbol": "x"}),
    ]
    axis = _value_axis(goal.metric, np.array([each.value(goal.metric) for each in (*whole, *pruned)], np.float64))
    layout: dict[str, Any] = {"xaxis_title_text": "trial", "yaxis": axis, "showlegend": True}
    return [_figure("history", "The search's course", [trace for trace in data if len(trace["x"])], **layout)]


def draw_importance(report: Report) -> list[Figure]:
    """Each key's share of what varied in the first goal."""
    if not report.importance:
        return []
    shares = list(report.importance.items())[::-1]  # plotly counts from below
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [share for _, share in shares],
        "y": [plain(key) for key, _ in shares],
        "texttemplate": "%{x:.2f}",
    }
    note = "fANOVA over the whole trials; the shares sum to 1."
    layout = {"xaxis_title_text": "share of the variance", "height": 90 + 40 * len(shares)}
    return [_figure("importance", "What mattered", [{**bars, "marker": {"color": ACCENT}}], note, **layout)]


def draw_parallel(report: Report) -> list[Figure]:
    """Parallel coordinates, a line for each job; [] for fewer than two keys that differ, or fewer than two jobs with a value.

    Of lines in SVG: plotly's own kind needs WebGL, and eval, which the page's policy refuses.
    """
    goals = [goal.metric for goal in report.goals]
    judged = [each for each in report.results if each.state in ("finished", "pruned")]
    shown = [each for each in judged if goals and all(_is_finite(each.value(name)) for name in goals)][:MOST_LINES]
    keys = [key for key in report.keys if len({each.keys.get(key) for each in shown}) > 1]
    if len(keys) < 2 or len(shown) < 2:
        return []
    axes = [_axis([each.keys.get(key, "") for each in shown]) for key in keys[:MOST_KEYS]]
    axes += [_axis([each.value(name) for each in shown], few=0) for name in goals]
    titles = [plain(title.rpartition(".")[2], most=16) for title in (*keys[:MOST_KEYS], *goals)]
    lines = []
    for rank, result in enumerate(shown):
        spread = (rank / (len(shown) - 1) - 0.5) * 0.02  # jobs with the same value stay apart by a hair
        reached = ", ".join(f"{name} {number_format.value(result.value(name))}" for name in goals)
        line = {
            "y": [places[rank] + spread for places, _ in axes],
            "mode": "lines",
            "line": {"color": shade(rank / (len(shown) - 1)), "width": 3 if result is report.best else 1.4},
            "opacity": 0.35 if result.state == "pruned" else 0.8,
            "text": f"{_told(result)}<br>{plain(reached)}",
            "hovertemplate": "%{text}<extra></extra>",
        }
        lines.append(line)
    words = [
        {"x": x, "y": y, "text": plain(text, most=14), "xanchor": "left", "yshift": 9, "showarrow": False}
        for x, (_, ticks) in enumerate(axes)
        for y, text in ticks
    ]
    layout = {
        "xaxis": {
            "tickvals": [*range(len(axes))],
            "ticktext": titles,
            "side": "top",
            "range": [-0.15, len(axes) - 0.4],
        },
        "yaxis": {"visible": False},
        "annotations": words,
        "margin_t": 46,
        "height": 420,
    }
    left = f"; {len(keys) - MOST_KEYS} more keys are in report.csv" if len(keys) > MOST_KEYS else ""
    note = f"A line is a job, from its keys to what it reached; the bluer, the better{left}."
    return [_figure("parallel", "Keys and what they reached", lines[::-1], note, **layout)]


def with_curves(report: Report) -> list[Result]:
    """The jobs whose curves are drawn, best first."""
    return [result for result in report.results if result.curves][:MOST_CURVES]


def job_colors(report: Report) -> dict[int, str]:
    """Few jobs or groups of seeds get a color each; more are shaded by their rank."""
    results = with_curves(report)
    groups = {job: number for number, group in enumerate(report.seeds) for job in group.jobs}
    if len(results) <= len(COLORS):
        return {result.job: COLORS[rank] for rank, result in enumerate(results)}
    if report.seeds and len(report.seeds) <= len(COLORS):
        return {each.job: COLORS[groups[each.job]] if each.job in groups else MUTED for each in results}
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


def _figure(name: str, title: str, data: list[dict[str, Any]], note: str = "", **layout: Any) -> Figure:
    from plotly import graph_objects  # heavy

    plot = graph_objects.Figure(data, THEME).update_xaxes(AXIS).update_yaxes(AXIS)
    return Figure(name, title, plot.update_layout(**layout), note)


def _curve(result: Result, name: str, color: str, *, is_best: bool, is_behind: bool) -> dict[str, Any]:
    curve = result.curves[name]
    width, opacity = (0.8, 0.3) if is_behind else (2.6, 1) if is_best else (1.2, 0.75)
    return {
        "x": curve.steps.astype(np.int32),  # half as long on the page, and enough for a screen
        "y": curve.values.astype(np.float32),
        "mode": "lines+markers" if len(curve.steps) < 40 and not is_behind else "lines",
        "marker": {"size": 4},
        "line": {"color": color, "width": width},
        "opacity": opacity,
        "name": plain(result.name),
        "meta": {"job": result.job},
        "hovertemplate": f"<b>{result.job}</b>  %{{fullData.name}}<br>step %{{x:,}}: %{{y:.5g}}<extra></extra>",
    }


def _band(group: Seeds, shown: Sequence[Result], name: str, colors: dict[int, str]) -> list[dict[str, Any]]:
    results = [each for each in shown if each.job in group.jobs]
    if len(results) < LEAST_OF_A_BAND:
        return []
    steps = max((each.curves[name].steps for each in results), key=lambda steps: int(steps[-1]))
    values = np.array(
        [np.interp(steps, each.curves[name].steps, each.curves[name].values, right=np.nan) for each in results]
    )
    steps, values = steps[np.isfinite(values).any(0)].astype(np.int32), values[:, np.isfinite(values).any(0)]
    low, median, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=0).astype(np.float32)
    color, told = (
        colors[results[0].job],
        f"{plain(group.name)}, {len(results)} {'runs' if group.num_folds > 1 else 'seeds'}",
    )
    of = {"meta": {"jobs": list(group.jobs)}}  # it is shown as long as one of them is
    area = {"x": np.concatenate([steps, steps[::-1]]), "y": np.concatenate([high, low[::-1]]), "fill": "toself", **of}
    return [
        {
            **area,
            "fillcolor": color,
            "opacity": 0.18,
            "mode": "none",
            "hoverinfo": "skip",
            "name": f"{told}: quartiles",
        },
        {
            **of,
            "x": steps,
            "y": median,
            "mode": "lines",
            "line": {"color": color, "width": 2.4},
            "name": told,
            "hovertemplate": "<b>%{fullData.name}</b><br>step %{x:,}: median %{y:.5g}<extra></extra>",
        },
    ]


def _dots(results: Sequence[Result], x: str, y: str, **look: Any) -> dict[str, Any]:
    return {
        "x": [result.job if x == "job" else result.value(x) for result in results],
        "y": [result.value(y) for result in results],
        "text": [_told(result) for result in results],
        "mode": "markers",
        "hovertemplate": "%{text}<br>%{y:.5g}<extra></extra>"
        if x == "job"
        else "%{text}<br>%{x:.5g}, %{y:.5g}<extra></extra>",
        **look,
    }


def _front(report: Report) -> Figure:
    one, other = (goal.metric for goal in report.goals[:2])
    finished = [each for each in report.results if each.state == "finished"]
    front = sorted((each for each in finished if each.job in report.front), key=lambda each: each.value(one) or 0.0)
    rest = [each for each in finished if each.job not in report.front]
    line = {"mode": "lines+markers", "line": {"width": 1.5, "dash": "dot"}, "marker": {"size": 9, "color": ACCENT}}
    data = [
        _dots(rest, one, other, name="beaten by another job", marker={"size": 7, "color": MUTED}),
        _dots(front, one, other, name="on the Pareto front", **line),
    ]
    layout: dict[str, Any] = {"xaxis_title_text": plain(one), "yaxis_title_text": plain(other), "showlegend": True}
    return _figure("front", "One goal against the other", data, **layout)


def _told(result: Result) -> str:
    return f"<b>{result.job}</b>  {plain(result.name)}"


def _value_axis(name: str, values: np.ndarray[Any, Any]) -> dict[str, Any]:
    values = values[np.isfinite(values)]
    spread = values.max() / values.min() if len(values) and values.min() > 0 else 1.0
    title = {"title_text": plain(name)}
    if spread <= 10 or "loss" not in name:
        return title
    return {**title, "type": "log", "dtick": "D2" if spread < 1000 else 1, "tickformat": "~g"}


def _axis(values: Sequence[Any], *, few: int = FEW) -> tuple[list[float], list[tuple[float, str]]]:
    numbers = {value: number for value in values if (number := _number(value)) is not None}
    if len(numbers) == len(set(values)) and len(set(numbers.values())) > few:
        low, high = min(numbers.values()), max(numbers.values())
        is_log = low > 0 and high / low >= 30
        scale = math.log if is_log else float
        middle = math.sqrt(low * high) if is_log else (low + high) / 2
        span = scale(high) - scale(low) or 1.0
        marks = {f"{mark:.3g}": (scale(mark) - scale(low)) / span for mark in (low, middle, high)}
        return [(scale(numbers[value]) - scale(low)) / span for value in values], [
            (y, text) for text, y in marks.items()
        ]
    words = sorted(set(values), key=lambda word: (numbers.get(word, math.inf), word))
    places = {word: number / max(1, len(words) - 1) for number, word in enumerate(words)}
    return [places[value] for value in values], [(y, word or "–") for word, y in places.items()][
        :: math.ceil(len(words) / 12)
    ]


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
