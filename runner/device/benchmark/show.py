"""`devices --bench`: has the machine measured, keeps what was found, and shows it as a table. Called by cli/devices.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runner.device import Hardware
from runner.device.benchmark import cache
from runner.device.benchmark.measure import cause, measure
from runner.device.benchmark.sizes import Sizes
from runner.device.benchmark.text import figure

#: what fits beside each other: the names of the rows, and a device's median with its spread
ROW_COLUMNS, DEVICE_COLUMNS = 34, 26
#: rows of the table by the keys of the figures; a key of several figures gives a row for each
ROWS = {
    "matmul_tflops": "large product, {}, TFLOP/s",
    "small_matmul_us": "{small}x{small} product, {}, us",
    "memory_gb_per_s": "memory (y += a x), GB/s",
    "memcpy_gb_per_s": "memcpy, GB/s",
    "copy_to_device_gb_per_s": "copy to the device, {}, GB/s",
    "copy_from_device_gb_per_s": "copy from the device, {}, GB/s",
    "launch_us": "one launch, us",
    "host_read_us": "one launch and a host read, us",
}


def bench(hardware: Hardware, *, sizes: Sizes | None = None) -> dict[str, Any]:
    """Measure every usable device, some 10 s each, and keep the figures unless their spread shows a busy machine.

    Returns measure()'s values, and `kept`, a path or None, with `not_kept`, the reason or None.
    """
    sizes = sizes or Sizes()
    with saying() as say:
        facts = measure(hardware, sizes=sizes, say=say)
    facts = {"small_size": sizes.small, **facts}
    if not facts["devices"]:
        return {**facts, "kept": None, "not_kept": "nothing was measured"}
    if busy := _busy(facts, sizes.most_spread):
        return {**facts, "kept": None, "not_kept": busy}
    try:
        kept = cache.keep(facts, hardware)
    except (OSError, RuntimeError) as error:  # a folder that is not there, is full or is somebody else's
        return {**facts, "kept": None, "not_kept": cause(error)}
    return {**facts, "kept": str(kept), "not_kept": None}


def _busy(facts: Mapping[str, Any], most_spread: float) -> str:
    """The figure that differs most between repetitions, where that is too much; else empty."""
    worst, found = most_spread, ""
    for name, device in facts["devices"].items():
        for key, lowest in device["lowest"].items():
            highest = device["highest"][key]
            is_nested = isinstance(lowest, dict)
            pairs = [*zip(lowest.values(), highest.values(), strict=True)] if is_nested else [(lowest, highest)]
            for low, high in pairs:
                if high > worst * low:
                    worst, spread = high / max(low, 1e-30), f"{figure(low)} to {figure(high)}"
                    found = (
                        f"{key} of {name} varies from {spread}, so the machine is busy: close other programs and repeat"
                    )
    return found


def print_bench(facts: Mapping[str, Any], console: Console) -> None:
    """Tables of as many devices as fit beside each other, then what else is to be said."""
    names = list(facts["devices"])
    beside = max(1, (console.width - ROW_COLUMNS) // DEVICE_COLUMNS)
    for first in range(0, len(names), beside):
        console.print()
        console.print(_table(facts, names[first : first + beside]))
    console.print()
    for line in remarks(facts):
        console.print(line, soft_wrap=True, markup=False)


def remarks(facts: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    lines = [f"{name} was not measured: {why}" for name, why in facts["failed"].items()]
    if both := facts["at_once"]:
        spread = f"{figure(both['lowest'])}-{figure(both['highest'])}"
        lines.append(
            f"{' and '.join(both['devices'])}, a large product each: "
            f"at once {figure(both['ratio'])} times ({spread}) faster than one after the other"
        )
    if facts["devices"]:
        threads = facts["num_threads"]
        lines.append(
            f"medians (lowest-highest); the CPU with {threads} thread{'s'[: threads > 1]}, as many as a run takes at most"
        )
    if facts["not_kept"]:
        return [*lines, f"not kept: {facts['not_kept']}"]
    return [*lines, f"kept     {facts['kept']}"]


def rows(facts: Mapping[str, Any], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each row's name and, for each device, its median with the spread, or nothing where it has no such figure."""
    devices = [facts["devices"][name] for name in names]
    for key, label in ROWS.items():
        found = [device[key] for device in devices if key in device]
        if found and isinstance(found[0], dict):
            for inner in dict.fromkeys(inner for values in found for inner in values):
                cells = [_cell(device, key, inner) for device in devices]
                yield label.format(inner, small=facts["small_size"]), cells
        elif found:
            yield label, [_cell(device, key) for device in devices]


def _table(facts: Mapping[str, Any], names: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measured", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for label, cells in rows(facts, names):
        table.add_row(label, *cells)
    return table


def _cell(device: Mapping[str, Any], key: str, inner: str = "") -> str:
    def at(values: Mapping[str, Any]) -> float | None:
        found = values.get(key)
        return found.get(inner) if inner and found is not None else found

    median, lowest, highest = at(device), at(device["lowest"]), at(device["highest"])
    if median is None or lowest is None or highest is None:
        return ""
    return f"{figure(median)} ({figure(lowest)}-{figure(highest)})"


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """What shows on stderr, where that is a terminal, what is measured now; gone at the end."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda work: None
        return
    # no thread that draws by itself: it would take the interpreter from the launches that are measured
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda work: live.update(Text(f"measuring {work}"), refresh=True)
