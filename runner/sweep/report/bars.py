"""The page's plots of comparisons: devices, seeds, and what mattered in a search."""

from __future__ import annotations

from typing import Any

from runner.sweep.report import number_format
from runner.sweep.report.figures import NUM_COLORS, Figure, plain
from runner.sweep.report.report import Report

MOST_GROUPS = 30
PIXELS_OF_BAR, PIXELS_OF_GROUP, PIXELS_OF_REST = 24, 16, 90


def draw_devices(report: Report) -> list[Figure]:
    """Samples a second of each set of jobs, a bar for each device, with its speed-up over the reference."""
    sets = report.devices[:MOST_GROUPS][::-1]  # plotly counts from below
    if not sets:
        return []
    devices = sorted({row.device for each in sets for row in each.rows}, key=lambda device: (device == "cpu", device))
    names = _labels([each.name for each in sets])
    data = []
    for number, device in enumerate(devices):
        found = [(name, each, row) for name, each in zip(names, sets, strict=True) for row in each.rows]
        pairs = [(name, each, row) for name, each, row in found if row.device == device]
        labels = [
            f" {number_format.speed(row.samples_per_second)}"
            + (
                ""
                if row is each.rows[0] or row.speed_up is None
                else f"   <b>{number_format.factor(row.speed_up)}×</b>"
            )
            for _, each, row in pairs
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(device),
                "y": [name for name, _, _ in pairs],
                "x": [row.samples_per_second for _, _, row in pairs],
                "text": labels,
                "textposition": "outside",
                "cliponaxis": False,
                "marker": {"color": f"var(--c{number % NUM_COLORS})" if device != "cpu" else "var(--muted)"},
                "hovertemplate": "%{y}<br>%{x:,.0f} samples/s<extra>%{fullData.name}</extra>",
            }
        )
    most = max((row.samples_per_second or 0 for each in sets for row in each.rows), default=0)
    layout = {
        "xaxis": {"title": {"text": "samples/s"}, "range": [0, most * 1.25 or 1], "tickformat": "~s"},
        "yaxis": {"automargin": True, "showgrid": False},
        "barmode": "group",
        "bargap": 0.28,
        "showlegend": True,
        "legend": {"traceorder": "reversed"},
        "height": _height(len(sets), len(devices)),
    }
    return [Figure("devices", "Samples a second", data, layout, least_width=480)]


def draw_seeds(report: Report) -> list[Figure]:
    """Mean and standard deviation of the first goal for each group of seeds, and the single jobs."""
    if not report.goals:
        return []
    goal = report.goals[0].metric
    groups = [group for group in report.seeds if goal in group.means][:MOST_GROUPS][::-1]
    if not groups:
        return []
    by_number = {result.job: result for result in report.results}
    names = _labels([group.name for group in groups])
    singles = [(name, by_number[job]) for name, group in zip(names, groups, strict=True) for job in group.jobs]
    means = [group.means[goal] for group in groups]
    data: list[dict[str, Any]] = [
        {
            "x": [result.value(goal) for _, result in singles],
            "y": [name for name, _ in singles],
            "text": [f"<b>{result.job}</b>  {plain(result.name)}" for _, result in singles],
            "mode": "markers",
            "name": "a job",
            "marker": {"size": 6, "color": "var(--muted)", "opacity": 0.6},
            "hovertemplate": "%{text}<br>%{x:.5g}<extra></extra>",
        },
        {
            "x": [mean.mean for mean in means],
            "y": names,
            "error_x": {
                "array": [mean.std or 0 for mean in means],
                "thickness": 2,
                "width": 6,
                "color": "var(--accent)",
            },
            "text": [f"{number_format.mean(mean)}, n = {mean.n}" for mean in means],
            "mode": "markers",
            "name": "mean ± std",
            "marker": {"size": 11, "color": "var(--accent)"},
            "hovertemplate": "%{y}<br>%{text}<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {"title": {"text": plain(goal)}},
        "yaxis": {"automargin": True, "type": "category"},
        "showlegend": True,
        "height": _height(len(groups), 1),
    }
    return [Figure("seeds", f"{goal} over seeds", data, layout, least_width=320)]


def draw_importance(report: Report) -> list[Figure]:
    """Each key's share of what varied in the first goal."""
    shares = list(report.importance.items())[:MOST_GROUPS][::-1]
    if not shares:
        return []
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [share for _, share in shares],
        "y": _labels([key for key, _ in shares]),
        "text": [f" {share:.2f}" for _, share in shares],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": "var(--accent)"},
        "hovertemplate": "%{y}: %{x:.3f}<extra></extra>",
    }
    layout = {
        "xaxis": {"range": [0, 1.1], "title": {"text": "share of the variance"}},
        "yaxis": {"automargin": True, "showgrid": False},
        "bargap": 0.4,
        "height": _height(len(shares), 1),
    }
    note = "fANOVA over the whole trials; the shares sum to 1."
    return [Figure("importance", "What mattered", [bars], layout, note)]


def _labels(names: list[str]) -> list[str]:
    """Short, and still apart: bars of one label would lie on one another."""
    found: list[str] = []
    for name in names:
        label = plain(name, width=26, most=70)
        found.append(label if label not in found else f"{label} ({len(found)})")
    return found


def _height(num_groups: int, num_bars: int) -> int:
    return PIXELS_OF_REST + num_groups * (PIXELS_OF_GROUP + PIXELS_OF_BAR * num_bars)
