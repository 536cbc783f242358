"""Measures how fast each device multiplies, copies and answers, and prints the table: `devices --bench`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

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

    def times(self, call: Callable[[], object]) -> list[float]:
        """Return seconds of one call, after a warm-up, measured in batches that are long enough for the clock."""
        self.seconds(call)
        count = 1
        while self.seconds(call, count) < self.sizes.batch_seconds:
            count *= 2
        return [self.seconds(call, count) / count for _ in range(self.sizes.repeats)]

    def microseconds(self, call: Callable[[], object]) -> Spread:
        return Spread.of([seconds * 1e6 for seconds in self.times(call)])

    def rate(self, call: Callable[[], object], amount: float) -> Spread:
        """Return how much of `amount` is done in a second."""
        return Spread.of([amount / seconds for seconds in self.times(call)])


def products(bench: Bench, precision: str) -> Figures:
    """Multiply two large square matrices, in TFLOP/s, and two small ones, in microseconds."""
    sizes, dtype = bench.sizes, DTYPES[precision]

    def product(size: int) -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
        return partial(torch.mm, left, right, out=torch.empty_like(left))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        most = min(sizes.most_large, math.isqrt(bench.at_most(2**62) // dtype.itemsize))
        size, call = sizes.first_large, product(sizes.first_large)
        # the first call loads kernels
        while size * 2 <= most and min(bench.seconds(call), bench.seconds(call)) < sizes.product_seconds:
            size *= 2
            call = product(size)
        return {
            f"matmul_tflops.{precision}": bench.rate(call, 2e-12 * size**3),
            f"matmul_size.{precision}": Spread(size, size, size),
            f"small_matmul_us.{precision}": bench.microseconds(product(sizes.small)),
        }
    finally:
        torch.set_float32_matmul_precision(before)


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


def memory_and_launches(bench: Bench) -> Figures:
    """Add a multiple of one array to another; change one number many times in a row, without and with a read of it."""
    num_floats = bench.at_most(bench.sizes.memory_bytes) // 4
    x, y = (torch.ones(num_floats, device=bench.device) for _ in range(2))
    number = torch.zeros(1, device=bench.device)
    return {
        "memory_gb_per_s": bench.rate(partial(y.add_, x, alpha=0.5), 3 * 4 * num_floats / 1e9),  # two reads, one write
        "launch_us": bench.microseconds(partial(number.add_, 1)),
        "host_read_us": bench.microseconds(lambda: float(number.add_(1).item())),
    }


def measure(hardware: Hardware, *, sizes: Sizes) -> dict[str, Any]:
    """Measure every usable device, one after the other, the CPU with the most threads that a run takes.

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
                figures = _figures(Bench(torch.device(name), sizes, gpu.free_bytes), hardware)
            except Exception as error:  # a driver may raise anything; the other devices can still be measured
                failed[name] = first_line(error)[:MAX_CAUSE_LENGTH]
            else:
                devices[name] = {"name": gpu.name, **plain(figures)}
    finally:
        torch.set_num_threads(before)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"small_size": sizes.small, "measured_at": at, "num_threads": THREADS, "devices": devices, "failed": failed}


def _figures(bench: Bench, hardware: Hardware) -> Figures:
    names = {precision for precision, problem in precisions(str(bench.device), hardware).items() if not problem}
    device, kind = bench.device, bench.device.type
    # Intel's smaller GPUs have no fp64
    if kind != "mps" and (kind != "xpu" or getattr(torch.xpu.get_device_properties(device), "has_fp64", False)):
        names.add("fp64")
    figures: Figures = {}
    for name in DTYPES:
        figures |= products(bench, name) if name in names else {}
    return figures | copies(bench) | memory_and_launches(bench)


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
    facts = measure(hardware, sizes=sizes)
    reason = _busy(facts, sizes.most_spread) if facts["devices"] else "nothing was measured"
    kept = None
    if not reason:
        try:
            kept = str(cache.keep(facts, hardware))
        except (OSError, RuntimeError) as error:  # the directory is missing, full or belongs to another user
            reason = first_line(error)
    return {**facts, "kept": kept, "not_kept": reason or None}


def _cells(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Spread]]:
    """Yield the device, key and kind of each figure, in the order of the table."""
    for name, device in facts["devices"].items():
        for key in filter(device.__contains__, ROWS):
            places = [device[key], device["lowest"][key], device["highest"][key]]
            for inner in device[key] if isinstance(device[key], dict) else [""]:
                yield name, key, inner, Spread(*(place[inner] if inner else place for place in places))


def _busy(facts: Mapping[str, Any], most_spread: float) -> str:
    """Name the figure that differs most between repetitions, if that is too much."""
    name, key, _, worst = max(_cells(facts), key=lambda cell: cell[3].highest / max(cell[3].lowest, 1e-30))
    if worst.highest <= most_spread * worst.lowest:
        return ""
    varies = f"{key} of {name} varies from {figure(worst.lowest)} to {figure(worst.highest)}"
    return f"{varies}, so the machine is busy: close other programs and repeat"


def print_bench(facts: Mapping[str, Any], console: Console) -> None:
    """Print a row for each figure of each device, then remarks."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (("device", "left"), ("measured", "left"), ("median", "right"), ("range", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, key, inner, spread in _cells(facts):
        label = ROWS[key].format(inner, small=facts["small_size"])
        table.add_row(name, label, figure(spread.median), f"{figure(spread.lowest)}-{figure(spread.highest)}")
    console.print("", table, "", sep="\n")
    for name, why in facts["failed"].items():
        console.print(f"{name} was not measured: {why}", soft_wrap=True, markup=False)
    if facts["devices"]:
        threads = f"{facts['num_threads']} thread{'s' * (facts['num_threads'] != 1)}"
        console.print(f"the CPU with {threads}, the maximum of a run", soft_wrap=True)
    kept = f"not kept: {facts['not_kept']}" if facts["not_kept"] else f"kept     {facts['kept']}"
    console.print(kept, soft_wrap=True, markup=False)
