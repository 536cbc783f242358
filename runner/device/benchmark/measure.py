"""Measures every usable device, one after the other; gives plain values, and why a device could not be measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.device import Hardware, precisions
from runner.device.backends import THREADS
from runner.device.benchmark.sizes import Bench, Figures, Sizes
from runner.device.benchmark.timing import Spread, long_enough, once, spread, waiter
from runner.device.unavailable import why_not

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def works(bench: Bench, precisions: list[str]) -> dict[str, Callable[[], Figures]]:
    """What is measured on a device, in order, by what a person reads while it is."""
    found: dict[str, Callable[[], Figures]] = {
        f"products in {name}": partial(products, bench, name) for name in precisions
    }
    return found | {
        "copies": partial(copies, bench),
        "memory": partial(memory, bench),
        "launches and reads": partial(launches, bench),
    }


def products(bench: Bench, precision: str) -> Figures:
    """A large product of square matrices, in TFLOP/s, with its number of rows; and a small one, in microseconds."""
    sizes = bench.sizes
    with float32_arithmetic(precision):
        most = min(sizes.most_large, math.isqrt(bench.at_most(2**62) // DTYPES[precision].itemsize))
        wait = waiter(bench.device)

        def seconds_at(size: int) -> float:
            call = product(size, bench.device, precision)
            return min(once(call, wait), once(call, wait))  # the first one loads kernels

        size = long_enough(seconds_at, first=sizes.first_large, most=most, least_seconds=sizes.product_seconds)
        large = bench.seconds(product(size, bench.device, precision))
        small = bench.seconds(product(sizes.small, bench.device, precision))
    return {
        f"matmul_tflops.{precision}": large.rate(2e-12 * size**3),
        f"matmul_size.{precision}": spread([size]),
        f"small_matmul_us.{precision}": small.times(1e6),
    }


def product(size: int, device: torch.device, precision: str = "fp32") -> Callable[[], Tensor]:
    """What multiplies two square matrices of random numbers; the result's memory is taken once."""
    left, right = (torch.randn(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


@contextmanager
def float32_arithmetic(precision: str) -> Iterator[None]:
    """Products of float32 in TF32 or in full, as before at the end."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def copies(bench: Bench) -> Figures:
    """GB/s to and from the device, from pageable and, where it knows such, from pinned memory; on the CPU a memcpy."""
    size = bench.at_most(bench.sizes.copy_bytes)
    there = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    if bench.device.type == "cpu":
        return {"memcpy_gb_per_s": bench.seconds(partial(torch.zeros_like(there).copy_, there)).rate(size / 1e9)}
    found: Figures = {}
    # a Mac's GPU shares the host's memory; torch may corrupt what it copies there without waiting (pytorch#83015)
    for kind in ("pageable",) if bench.device.type == "mps" else ("pageable", "pinned"):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        for direction, to, source in (("to", there, here), ("from", here, there)):
            seconds = bench.seconds(partial(to.copy_, source, non_blocking=kind == "pinned"))
            found[f"copy_{direction}_device_gb_per_s.{kind}"] = seconds.rate(size / 1e9)
    return found


def memory(bench: Bench) -> Figures:
    """GB/s of y += a * x, which reads two arrays and writes one."""
    num_floats = bench.at_most(bench.sizes.memory_bytes) // 4
    x, y = (torch.ones(num_floats, device=bench.device) for _ in range(2))
    return {"memory_gb_per_s": bench.seconds(partial(y.add_, x, alpha=0.5)).rate(3 * 4 * num_floats / 1e9)}


def launches(bench: Bench) -> Figures:
    """Microseconds of an operation on one number: many in a row, and with a read of the number after each."""
    number = torch.zeros(1, device=bench.device)

    def read() -> float:
        return float(number.add_(1).item())

    launch, both = bench.seconds(partial(number.add_, 1)), bench.seconds(read)
    return {"launch_us": launch.times(1e6), "host_read_us": both.times(1e6)}


def at_once(first: Bench, second: Bench, size: int) -> Spread:
    """How many times faster two devices are with a product each at the same time than one after the other; 2 at best."""
    calls = [product(size, bench.device) for bench in (first, second)]
    waits = [waiter(bench.device) for bench in (first, second)]

    def one_after_the_other() -> None:
        for call, wait in zip(calls, waits, strict=True):
            call()
            wait()

    def together() -> None:
        for call in calls:
            call()
        for wait in waits:
            wait()

    for way in (one_after_the_other, together):
        once(way, waits[0])
    return spread([once(one_after_the_other, waits[0]) / once(together, waits[0]) for _ in range(first.sizes.repeats)])


ORDER = ("fp32", "tf32", "bf16", "fp16", "fp64")
MOST_LETTERS = 160  # of a cause


def measure(hardware: Hardware, *, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Every usable device, one after the other; the keys name the units.

    devices: by name, medians; `lowest` and `highest` repeat the keys. failed: causes by device. at_once: of the first
    two accelerators, or None. The CPU gets as many threads as a run takes at most. say: is told each work before it begins.
    """
    devices: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    benches: dict[str, Bench] = {}
    with _all_threads() as num_threads:
        for name, gpu in hardware.devices().items():
            if why_not(name, hardware) is not None:
                continue
            bench = Bench(torch.device(name), sizes, gpu.free_bytes)
            try:
                figures = _figures(bench, _precisions(name, hardware), say)
            except Exception as error:  # whatever a driver raises is that device's affair alone
                failed[name] = cause(error)
            else:
                benches[name] = bench
                devices[name] = {"name": gpu.name, **plain(figures)}
        both = _both([bench for name, bench in benches.items() if name != "cpu"], devices, failed, say)
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_threads": num_threads,
        "devices": devices,
        "at_once": both,
        "failed": failed,
    }


def plain(figures: Figures) -> dict[str, Any]:
    """The medians of one device, nested by their dotted names, and beside them what lies lowest and highest."""
    found = _nested({name: each.median for name, each in figures.items()})
    if "matmul_size" in found:
        found["matmul_size"] = {name: int(size) for name, size in found["matmul_size"].items()}
    varied = {name: each for name, each in figures.items() if not name.startswith("matmul_size")}
    found["lowest"] = _nested({name: each.lowest for name, each in varied.items()})
    found["highest"] = _nested({name: each.highest for name, each in varied.items()})
    return found


def cause(error: BaseException) -> str:
    """Its first line, short; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."


def _figures(bench: Bench, names: list[str], say: Callable[[str], None]) -> Figures:
    figures: Figures = {}
    for work, measured in works(bench, names).items():
        say(f"{bench.device}: {work}")
        figures |= measured()
    return figures


def _both(
    accelerators: list[Bench], devices: dict[str, Any], failed: dict[str, str], say: Callable[[str], None]
) -> dict[str, Any] | None:
    if len(accelerators) < 2:
        return None
    first, second = accelerators[:2]
    names = [str(first.device), str(second.device)]
    say(" and ".join(names))
    try:
        ratio = at_once(first, second, min(int(devices[name]["matmul_size"]["fp32"]) for name in names))
    except Exception as error:  # as above
        failed[" and ".join(names)] = cause(error)
        return None
    return {"devices": names, "ratio": ratio.median, "lowest": ratio.lowest, "highest": ratio.highest}


def _precisions(name: str, hardware: Hardware) -> list[str]:
    can = {precision for precision, no in precisions(name, hardware).items() if not no}
    if _has_fp64(torch.device(name)):
        can.add("fp64")
    return [precision for precision in ORDER if precision in can]


def _has_fp64(device: torch.device) -> bool:
    if device.type == "xpu":  # Intel's smaller GPUs lack it
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", False))
    return device.type != "mps"


def _nested(values: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = value
        else:
            found[outer] = value
    return found


@contextmanager
def _all_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
