"""Prints how many points a run's metrics have, and where they begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from runner.experiment.terminal import Terminal
from runner.sweep.report import number_format

TITLES = ("metric", "points", "steps", "first", "last", "least", "greatest")


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """found: as runs.history.summary() gives it."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for title in TITLES:
        table.add_column(title, justify="left" if title == "metric" else "right", overflow="fold")
    for name, one in found.items():
        values = [number_format.value(one[key]) for key in TITLES[3:]]
        first, last = one["first_step"], one["last_step"]
        steps = f"{first:,} to {last:,}" if first != last else f"{last:,}"
        cells = [name, f"{one['points']:,}", steps, *values]
        table.add_row(*map(Text, cells))
    Terminal(soft_wrap=False).print(table)
