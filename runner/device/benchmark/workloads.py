"""The works that are timed on a device: products, copies, memory, launches, host reads; each gives figures by dotted name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from runner.device.benchmark.sizes import Bench, Figures
from runner.device.benchmark.timing import Spread, long_enough, once, spread, waiter

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
