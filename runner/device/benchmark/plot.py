"""What was measured goes in; a picture of it comes out: products by precision, bandwidths, a color for each device."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from runner.device.benchmark.text import figure

COLORS = ("#4878d0", "#ee854a", "#6acc64", "#d65f5f", "#956cb4", "#8c613c", "#dc7ec0", "#797979", "#d5bb67")
#: from where on the smaller bars could not be read beside the tallest
WIDEST_LINEAR = 30
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
BANDWIDTHS = {
    "memory": ("memory_gb_per_s", ""),
    "memcpy": ("memcpy_gb_per_s", ""),
    "to device,\npinned": ("copy_to_device_gb_per_s", "pinned"),
    "to device,\npageable": ("copy_to_device_gb_per_s", "pageable"),
    "from device,\npinned": ("copy_from_device_gb_per_s", "pinned"),
    "from device,\npageable": ("copy_from_device_gb_per_s", "pageable"),
}


def draw(facts: Mapping[str, Any]) -> bytes:
    """A PNG, about 0.5 s. facts: as measure() returns them, with one device at least."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy; pyplot would keep global state
    from matplotlib.figure import Figure

    names = list(facts["devices"])
    drawing = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(drawing)
    left, right = drawing.subplots(1, 2)
    _bars(left, names, {name: ("matmul_tflops", name) for name in PRECISIONS}, facts, "large products, TFLOP/s")
    _bars(right, names, BANDWIDTHS, facts, "bandwidths, GB/s")
    handles, labels = left.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside upper center", ncols=min(len(names), 4), frameon=False)
    content = io.BytesIO()
    drawing.savefig(content, dpi=120)
    return content.getvalue()


def is_wide(values: Sequence[float]) -> bool:
    """Whether a linear axis would hide the smallest of them."""
    return max(values) > WIDEST_LINEAR * min(values)


def _bars(
    axes: Any, names: list[str], places: Mapping[str, tuple[str, str]], facts: Mapping[str, Any], title: str
) -> None:
    """A group of bars for each place that any device has a figure for; lines show the spread, numbers the median."""
    found = {label: {name: _at(facts["devices"][name], place) for name in names} for label, place in places.items()}
    shown = [label for label, values in found.items() if any(values.values())]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [(at, value) for at, label in enumerate(shown) if (value := found[label][name])]
        medians = [median for _, (median, _, _) in values]
        bars = axes.bar(
            [at + (number - (len(names) - 1) / 2) * width for at, _ in values],
            medians,
            width * 0.92,
            yerr=[[each[0] - each[1] for _, each in values], [each[2] - each[0] for _, each in values]],
            color=COLORS[number % len(COLORS)],
            error_kw={"ecolor": "#555555", "elinewidth": 1},
            label=f"{name}: {facts['devices'][name]['name']}",
        )
        labels = [figure(median) for median in medians]
        axes.bar_label(bars, labels, padding=2, fontsize=8, rotation=90 if len(names) > 2 else 0)
    _scale(axes, [value for label in shown for values in found[label].values() if values for value in values])
    axes.set_xticks(range(len(shown)), shown, fontsize=9)
    axes.set_xlim(-0.5, len(shown) - 0.5)
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Room for the numbers above the tallest bar, and on a logarithmic axis for the smallest bar, too."""
    if is_wide(values):
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(min(values)) - 0.3), 5 * max(values))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.2 * max(values))


def _at(device: Mapping[str, Any], place: tuple[str, str]) -> tuple[float, float, float] | None:
    """The device's figure of that name: median, lowest, highest; None where it has none."""
    outer, inner = place
    found = [values.get(outer) for values in (device, device["lowest"], device["highest"])]
    if inner:
        found = [values.get(inner) if values is not None else None for values in found]
    median, lowest, highest = found
    return None if median is None or lowest is None or highest is None else (median, lowest, highest)
