"""Puts measured figures in words: the line of a sweep that compares its devices, and the table's numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from runner.device.benchmark.cache import Measured


def figure(value: float) -> str:
    """With three digits that count; large ones whole, without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:#.3g}"


def comparison(measured: Measured | None, devices: Iterable[str]) -> str:
    """How the kinds of devices compare in fp32, the fastest of each kind, best first; "" for fewer than two kinds.

    For example: cuda:0 41.0 TFLOP/s fp32, cpu 0.098 (418 times)
    """
    if measured is None:
        return ""
    wanted = set(devices)
    speeds = {
        name: found.flops_per_second["fp32"]
        for name, found in measured.devices.items()
        if name in wanted and "fp32" in found.flops_per_second
    }
    best: dict[str, str] = {}
    for name in sorted(speeds, key=lambda name: -speeds[name]):
        best.setdefault(name.partition(":")[0], name)
    first, *others = best.values() or [""]
    if not others:
        return ""
    rest = [f"{name} {figure(speeds[name] / 1e12)} ({_times(speeds[first] / speeds[name])})" for name in others]
    return ", ".join([f"{first} {figure(speeds[first] / 1e12)} TFLOP/s fp32", *rest])


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 9.95 else f"{ratio:.1f} times"
