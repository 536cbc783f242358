"""Measures how fast each device multiplies, copies and answers (`devices --bench`), and keeps the figures for plans."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from runner.device.backends import THREADS
from runner.device.hardware import Hardware, Speeds
from runner.device.streams import wait_for
from runner.device.unavailable import precisions, why_not
from runner.errors import first_line

VERSION = 3  # of the file
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
MAX_CAUSE_LENGTH = 160
#: maximum of the slowest repetition by the fastest, above which the machine was busy
MAX_SPREAD = 50.0
#: one device's medians by name, with the unit at the end; a figure of several kinds is a dict
Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Amount of work. The defaults take some 10 s on two cores, less on a GPU."""

    first_large: int = 256  # rows of the first square matrix; doubled from there
    most_large: int = 32768
    product_seconds: float = 0.01  # minimum of a large product
    seconds: float = 0.2  # minimum for each figure
    copy_bytes: int = 128 * 2**20
    memory_bytes: int = 256 * 2**20  # of each of two arrays: larger than a cache


@dataclass(frozen=True)
class Bench:
    """One device under measurement."""

    device: torch.device
    sizes: Sizes
    free_bytes: int | None = None  # None: unknown
    spreads: list[float] = field(default_factory=list)  # the slowest repetition by the fastest, for each figure

    def at_most(self, wanted_bytes: int) -> int:
        """Limit an array to an eighth of the free memory."""
        return wanted_bytes if self.free_bytes is None else max(4, min(wanted_bytes, self.free_bytes // 8))

    def timer(self, call: Callable[[], object]) -> Timer:
        """Return torch's timer of a call, on all threads that a run may take; it waits for the device."""

        def clock() -> float:
            wait_for(self.device)
            return time.perf_counter()

        return Timer("call()", globals={"call": call}, timer=clock, num_threads=THREADS)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median of one call."""
        measured = self.timer(call).blocked_autorange(min_run_time=self.sizes.seconds)
        self.spreads.append(max(measured.times) / min(measured.times))
        return float(measured.median)


def product_tflops(bench: Bench, precision: str) -> float:
    """Return the TFLOP/s of a product of large square matrices."""
    sizes, dtype = bench.sizes, DTYPES[precision]

    def product(size: int) -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
        return partial(torch.mm, left, right, out=torch.empty_like(left))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        most = min(sizes.most_large, math.isqrt(bench.at_most(2**62) // dtype.itemsize))
        size = sizes.first_large
        while size * 2 <= most and bench.timer(product(size)).timeit(1).median < sizes.product_seconds:
            size *= 2
        return 2e-12 * size**3 / bench.seconds(product(size))
    finally:
        torch.set_float32_matmul_precision(before)


def copies(bench: Bench) -> Figures:
    """Copy to and from the device, from pageable and, where there is any, pinned memory; on the CPU a memcpy."""
    size = bench.at_most(bench.sizes.copy_bytes)
    on_device = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    if bench.device.type == "cpu":
        return {"memcpy_gb_per_s": size / 1e9 / bench.seconds(partial(torch.zeros_like(on_device).copy_, on_device))}
    figures: Figures = {"copy_to_device_gb_per_s": {}, "copy_from_device_gb_per_s": {}}
    # a Mac's GPU shares the host's memory; torch may corrupt what it copies to it without waiting (pytorch#83015)
    for kind in ("pageable",) if bench.device.type == "mps" else ("pageable", "pinned"):
        on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for direction, target, source in (("to", on_device, on_host), ("from", on_host, on_device)):
            seconds = bench.seconds(partial(target.copy_, source, non_blocking=kind == "pinned"))
            figures[f"copy_{direction}_device_gb_per_s"][kind] = size / 1e9 / seconds
    return figures


def memory_and_launches(bench: Bench) -> Figures:
    """Add a multiple of one array to another; change one number many times in a row, without and with a read of it."""
    num_floats = bench.at_most(bench.sizes.memory_bytes) // 4
    x, y = (torch.ones(num_floats, device=bench.device) for _ in range(2))
    number = torch.zeros(1, device=bench.device)
    moved_bytes = 3 * 4 * num_floats  # two reads, one write
    return {
        "memory_gb_per_s": moved_bytes / 1e9 / bench.seconds(partial(y.add_, x, alpha=0.5)),
        "launch_us": bench.seconds(partial(number.add_, 1)) * 1e6,
        "host_read_us": bench.seconds(lambda: float(number.add_(1).item())) * 1e6,
    }


def bench(hardware: Hardware, *, sizes: Sizes | None = None) -> dict[str, Any]:
    """Measure every usable device, one after the other, some 10 s each, and keep the figures.

    Returns:
        Plain values, whose keys name the units: `devices` has the medians by device, `failed` the causes by device, `kept`
        the file or None, and `not_kept` the reason or None.
    """
    devices: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    spread = 0.0
    for name, gpu in hardware.devices().items():
        if why_not(name, hardware) is not None:
            continue
        measurement = Bench(torch.device(name), sizes or Sizes(), gpu.free_bytes)
        try:
            figures = _figures(measurement, hardware)
        except Exception as error:  # a driver may raise anything; the other devices can still be measured
            failed[name] = first_line(error)[:MAX_CAUSE_LENGTH]
        else:
            devices[name] = {"name": gpu.name, **figures}
            spread = max([spread, *measurement.spreads])
    at = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"measured_at": at, "num_threads": THREADS, "devices": devices, "failed": failed}
    kept, not_kept = None, None if devices else "nothing was measured"
    if spread > MAX_SPREAD:
        not_kept = f"a repetition took {spread:.0f} times as long as another: close other programs and repeat"
    elif devices:
        try:
            kept = str(keep(facts, hardware))
        except (OSError, RuntimeError) as error:  # the directory is missing, full or belongs to another user
            not_kept = first_line(error)
    return {**facts, "kept": kept, "not_kept": not_kept}


def _figures(bench: Bench, hardware: Hardware) -> Figures:
    device, kind = bench.device, bench.device.type
    reasons = precisions(str(device), hardware)
    # Intel's smaller GPUs have no fp64
    has_fp64 = kind != "mps" and (kind != "xpu" or torch.xpu.get_device_properties(device).has_fp64)
    names = [name for name in DTYPES if (has_fp64 if name == "fp64" else not reasons[name])]
    return {
        "matmul_tflops": {name: product_tflops(bench, name) for name in names},
        **copies(bench),
        **memory_and_launches(bench),
    }


def read(hardware: Hardware) -> dict[str, Speeds]:
    """Return the figures of this machine by device; empty for a missing or damaged file."""
    try:
        stored = json.loads(path(hardware).read_text(encoding="utf-8"))
        at = str(stored["measured_at"])
        return {name: _speeds(facts, at) for name, facts in stored["devices"].items()}
    # also where the user has no home directory
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _speeds(facts: Mapping[str, Any], at: str) -> Speeds:
    copies = facts.get("copy_to_device_gb_per_s") or {"pageable": facts["memcpy_gb_per_s"]}
    return Speeds(
        flops_per_second={name: value * 1e12 for name, value in facts["matmul_tflops"].items()},
        memory_bytes_per_second=facts["memory_gb_per_s"] * 1e9,
        copy_bytes_per_second=copies.get("pinned", copies["pageable"]) * 1e9,
        launch_seconds=facts["launch_us"] / 1e6,
        measured_at=at,
    )


def keep(facts: Mapping[str, Any], hardware: Hardware) -> Path:
    """Replace the stored figures of this machine, and return the file.

    Raises:
        OSError: The directory can't be written to. The earlier file stays whole.
        RuntimeError: The user has no home directory.
    """
    file = path(hardware)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return temporary.replace(file)


def path(hardware: Hardware) -> Path:
    """Return the file of this machine, whether it exists or not.

    Its name is a hash of what makes figures comparable: the devices, torch's build, the threads; not of the host name,
    which changes in containers. Raises: RuntimeError if the user has no home directory.
    """
    devices = {name: [gpu.name, gpu.uuid] for name, gpu in hardware.devices().items()}
    identity = json.dumps([VERSION, hardware.torch_version, hardware.num_cpus, THREADS, devices])
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (caches if caches.is_absolute() else Path.home() / ".cache") / "runner"  # XDG ignores relative paths
    return folder / f"bench-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"
