"""Measures every usable device, one after the other; gives plain values, and why a device could not be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch

from runner.device import Hardware, precisions
from runner.device.backends import THREADS
from runner.device.benchmark.sizes import Bench, Figures, Sizes
from runner.device.benchmark.workloads import at_once, works
from runner.device.unavailable import why_not

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
