"""What was measured goes in; a picture of it comes out: products by precision, bandwidths, a color for each device."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from runner.bench.wording import figure

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
    devices = facts["devices"]
    shown = [label for label, place in places.items() if any(_at(devices[name], place) is not None for name in names)]
    width = 0.8 / len(names)
    every: list[float] = []
    for number, name in enumerate(names):
        found = [
            (at, place) for at, label in enumerate(shown) if _at(devices[name], place := places[label]) is not None
        ]
        values = [_at(devices[name], place) or 0.0 for _, place in found]
        below = [
            value - (_at(devices[name]["lowest"], place) or value)
            for value, (_, place) in zip(values, found, strict=True)
        ]
        above = [
            (_at(devices[name]["highest"], place) or value) - value
            for value, (_, place) in zip(values, found, strict=True)
        ]
        where = [at + (number - (len(names) - 1) / 2) * width for at, _ in found]
        bars = axes.bar(
            where,
            values,
            width * 0.92,
            yerr=[below, above],
            color=COLORS[number % len(COLORS)],
            error_kw={"ecolor": "#555555", "elinewidth": 1},
            label=f"{name}: {devices[name]['name']}",
        )
        labels = [figure(value) for value in values]
        axes.bar_label(bars, labels, padding=2, fontsize=8, rotation=90 if len(names) > 2 else 0)
        every += values
    if is_wide(every):
        axes.set_yscale("log")
        axes.set_ylim(bottom=10 ** math.floor(math.log10(min(every)) - 0.3))  # the smallest bar is seen, too
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(shown)), shown, fontsize=9)
    axes.set_title(title, fontsize=11)
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _at(device: Mapping[str, Any], place: tuple[str, str]) -> float | None:
    """The device's figure of that name; None where it has none."""
    outer, inner = place
    found = device.get(outer)
    return found if not inner or found is None else found.get(inner)
