"""Measures how fast each device multiplies, copies and answers, and prints the table: `devices --bench`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor

from runner.device import Hardware, precisions
from runner.device.backends import THREADS
from runner.device.benchmark import cache
from runner.device.benchmark.cache import figure
from runner.device.streams import wait_for
from runner.device.unavailable import why_not
from runner.errors import first_line

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
#: width of the row names and of a device's median with its range
ROW_COLUMNS, DEVICE_COLUMNS = 34, 26
MAX_CAUSE_LENGTH = 160
#: rows of the table by the keys of the figures; a key of several figures has a row for each
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


@dataclass(frozen=True)
class Sizes:
    """Amount of work. The defaults take some 10 s on two cores of 2020, less on a GPU."""

    first_large: int = 256  # rows of the first square matrix; doubled from there
    most_large: int = 32768
    small: int = 64
    product_seconds: float = 0.01  # minimum of a large product
    batch_seconds: float = 0.01  # minimum of the calls between two looks at the clock
    copy_bytes: int = 128 * 2**20
    memory_bytes: int = 256 * 2**20  # of each of two arrays: larger than a cache
    repeats: int = 5
    most_spread: float = 50.0  # highest by lowest of a figure; above it the machine was busy


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of several measurements."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


#: by dotted name, with the unit at its end or before the dot
Figures = dict[str, Spread]


@dataclass(frozen=True)
class Bench:
    """One device under measurement."""

    device: torch.device
    sizes: Sizes
    free_bytes: int | None = None  # None: unknown

    def at_most(self, wanted_bytes: int) -> int:
        """Limit an array to an eighth of the free memory."""
        return wanted_bytes if self.free_bytes is None else max(4, min(wanted_bytes, self.free_bytes // 8))

    def seconds(self, call: Callable[[], object], count: int = 1) -> float:
        """Return the seconds of `count` calls, without a wait between them."""
        wait_for(self.device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait_for(self.device)
        return time.perf_counter() - began

    def microseconds(self, call: Callable[[], object]) -> Spread:
        """Time one call, after a warm-up, in batches that are long enough for the clock."""
        self.seconds(call)
        count = 1
        while self.seconds(call, count) < self.sizes.batch_seconds:
            count *= 2
        return Spread.of([self.seconds(call, count) / count * 1e6 for _ in range(self.sizes.repeats)])

    def rate(self, call: Callable[[], object], amount: float) -> Spread:
        """Return how much of `amount` is done in a second; the longest time is the lowest rate."""
        took = self.microseconds(call)
        return Spread(*(amount * 1e6 / each for each in (took.median, took.highest, took.lowest)))


def products(bench: Bench, precision: str) -> Figures:
    """Multiply two large square matrices, in TFLOP/s, and two small ones, in microseconds."""
    sizes = bench.sizes
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        most = min(sizes.most_large, math.isqrt(bench.at_most(2**62) // DTYPES[precision].itemsize))
        size, call = sizes.first_large, _product(bench, sizes.first_large, precision)
        # the first call loads kernels
        while size * 2 <= most and min(bench.seconds(call), bench.seconds(call)) < sizes.product_seconds:
            size *= 2
            call = _product(bench, size, precision)
        return {
            f"matmul_tflops.{precision}": bench.rate(call, 2e-12 * size**3),
            f"matmul_size.{precision}": Spread(size, size, size),
            f"small_matmul_us.{precision}": bench.microseconds(_product(bench, sizes.small, precision)),
        }
    finally:
        torch.set_float32_matmul_precision(before)


def _product(bench: Bench, size: int, precision: str) -> Callable[[], Tensor]:
    left, right = (torch.randn(size, size, device=bench.device, dtype=DTYPES[precision]) for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


def copies(bench: Bench) -> Figures:
    """Copy to and from the device, from pageable and, where there is any, pinned memory; on the CPU a memcpy."""
    size = bench.at_most(bench.sizes.copy_bytes)
    there = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    if bench.device.type == "cpu":
        return {"memcpy_gb_per_s": bench.rate(partial(torch.zeros_like(there).copy_, there), size / 1e9)}
    figures: Figures = {}
    # a Mac's GPU shares the host's memory; torch may corrupt what it copies there without waiting (pytorch#83015)
    for kind in ("pageable",) if bench.device.type == "mps" else ("pageable", "pinned"):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for direction, to, source in (("to", there, here), ("from", here, there)):
            call = partial(to.copy_, source, non_blocking=kind == "pinned")
            figures[f"copy_{direction}_device_gb_per_s.{kind}"] = bench.rate(call, size / 1e9)
    return figures


def memory(bench: Bench) -> Figures:
    """Add a multiple of one array to another, which reads two and writes one."""
    num_floats = bench.at_most(bench.sizes.memory_bytes) // 4
    x, y = (torch.ones(num_floats, device=bench.device) for _ in range(2))
    return {"memory_gb_per_s": bench.rate(partial(y.add_, x, alpha=0.5), 3 * 4 * num_floats / 1e9)}


def launches(bench: Bench) -> Figures:
    """Change one number many times in a row, and with a read of it after each change."""
    number = torch.zeros(1, device=bench.device)
    launch = bench.microseconds(partial(number.add_, 1))
    return {"launch_us": launch, "host_read_us": bench.microseconds(lambda: float(number.add_(1).item()))}


def measure(hardware: Hardware, *, sizes: Sizes, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure every usable device, one after the other, the CPU with the most threads that a run takes.

    Args:
        report: Takes the name of each workload before it begins.

    Returns:
        Plain values, whose keys name the units. `devices` has the medians by device, with the same keys in `lowest` and
        `highest`; `failed` has the causes by device.
    """
    devices: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        for name, gpu in hardware.devices().items():
            if why_not(name, hardware) is not None:
                continue
            try:
                figures = _figures(Bench(torch.device(name), sizes, gpu.free_bytes), hardware, report)
            except Exception as error:  # a driver may raise anything; the other devices can still be measured
                failed[name] = first_line(error)[:MAX_CAUSE_LENGTH]
            else:
                devices[name] = {"name": gpu.name, **plain(figures)}
    finally:
        torch.set_num_threads(before)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"small_size": sizes.small, "measured_at": at, "num_threads": THREADS, "devices": devices, "failed": failed}


def _figures(bench: Bench, hardware: Hardware, report: Callable[[str], None]) -> Figures:
    names = {precision for precision, problem in precisions(str(bench.device), hardware).items() if not problem}
    device, kind = bench.device, bench.device.type
    # Intel's smaller GPUs have no fp64
    if kind != "mps" and (kind != "xpu" or getattr(torch.xpu.get_device_properties(device), "has_fp64", False)):
        names.add("fp64")
    works: dict[str, Callable[[Bench], Figures]] = {
        **{f"products in {name}": partial(products, precision=name) for name in DTYPES if name in names},
        "copies": copies,
        "memory": memory,
        "launches and reads": launches,
    }
    figures: Figures = {}
    for work, function in works.items():
        report(f"{device}: {work}")
        figures |= function(bench)
    return figures


def plain(figures: Figures) -> dict[str, Any]:
    """Return the medians of one device, nested by their dotted names, with their `lowest` and `highest`."""
    values: dict[str, Any] = {"lowest": {}, "highest": {}}
    places = {"median": values, "lowest": values["lowest"], "highest": values["highest"]}
    for name, spread in figures.items():
        outer, _, inner = name.partition(".")
        for kind, place in places.items():
            if kind == "median" or outer != "matmul_size":
                (place.setdefault(outer, {}) if inner else place)[inner or outer] = getattr(spread, kind)
    return values


def bench(hardware: Hardware, *, sizes: Sizes | None = None) -> dict[str, Any]:
    """Measure every usable device, some 10 s each, and store the figures unless their spread shows a busy machine.

    Returns:
        The values of `measure()`, and `kept`, a path or None, with `not_kept`, the reason or None.
    """
    sizes = sizes or Sizes()
    with _reporting() as report:
        facts = measure(hardware, sizes=sizes, report=report)
    reason = _busy(facts, sizes.most_spread) if facts["devices"] else "nothing was measured"
    kept = None
    if not reason:
        try:
            kept = str(cache.keep(facts, hardware))
        except (OSError, RuntimeError) as error:  # the directory is missing, full or belongs to another user
            reason = first_line(error)
    return {**facts, "kept": kept, "not_kept": reason or None}


def _cells(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Spread]]:
    """Key, kind and device of each figure, in the order of the table."""
    for key in ROWS:
        for name, device in facts["devices"].items():
            if key in device:
                places = [device[key], device["lowest"][key], device["highest"][key]]
                for inner in device[key] if isinstance(device[key], dict) else [""]:
                    yield key, inner, name, Spread(*(place[inner] if inner else place for place in places))


def _busy(facts: Mapping[str, Any], most_spread: float) -> str:
    """Name the figure that differs most between repetitions, if that is too much."""
    cells = list(_cells(facts))
    key, _, name, worst = max(cells, key=lambda cell: cell[3].highest / max(cell[3].lowest, 1e-30))
    if worst.highest <= most_spread * worst.lowest:
        return ""
    varies = f"{key} of {name} varies from {figure(worst.lowest)} to {figure(worst.highest)}"
    return f"{varies}, so the machine is busy: close other programs and repeat"


def print_bench(facts: Mapping[str, Any], console: Console) -> None:
    """Print tables of as many devices as fit the terminal, then remarks."""
    names = list(facts["devices"])
    count = max(1, (console.width - ROW_COLUMNS) // DEVICE_COLUMNS)
    for first in range(0, len(names), count):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("measured", no_wrap=True)
        for name in names[first : first + count]:
            table.add_column(name, justify="right", no_wrap=True)
        for label, cells in rows(facts, names[first : first + count]):
            table.add_row(label, *cells)
        console.print()
        console.print(table)
    console.print()
    for name, why in facts["failed"].items():
        console.print(f"{name} was not measured: {why}", soft_wrap=True, markup=False)
    if names:
        threads = f"{facts['num_threads']} thread{'s' * (facts['num_threads'] != 1)}"
        console.print(f"medians (lowest-highest); the CPU with {threads}, the maximum of a run", soft_wrap=True)
    kept = f"not kept: {facts['not_kept']}" if facts["not_kept"] else f"kept     {facts['kept']}"
    console.print(kept, soft_wrap=True, markup=False)


def rows(facts: Mapping[str, Any], names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's name and its cell for each device, empty where the device has no such figure."""
    table: dict[str, dict[str, str]] = {}
    for key, inner, name, spread in _cells(facts):
        if name in names:
            cell = f"{figure(spread.median)} ({figure(spread.lowest)}-{figure(spread.highest)})"
            table.setdefault(ROWS[key].format(inner, small=facts["small_size"]), {})[name] = cell
    for label, cells in table.items():
        yield label, [cells.get(name, "") for name in names]


@contextmanager
def _reporting() -> Iterator[Callable[[str], None]]:
    """Show the current workload on stderr, where that is a terminal, and clear it at the end."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda work: None
        return
    # without Live's thread, which would compete with the launches that are measured
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda work: live.update(Text(f"measuring {work}"), refresh=True)
