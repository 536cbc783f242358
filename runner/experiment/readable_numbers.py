"""Formats numbers in at most 10 characters, and durations: on the screen, in a sweep's table and in its report."""

from __future__ import annotations

import math

WIDTH = 10


def readable(value: float) -> str:
    """0.9832, 1,234.5, 6.285e+10, 1.000e-12, nan. What is not 1 is not shown as 1: an accuracy of 0.99999 stays one."""
    size = abs(value)
    if not math.isfinite(value):
        return str(float(value))
    if size != 0 and (size < 1e-3 or size >= 999_999.95):
        return f"{value:.3e}"
    if size >= 99.99995:
        return f"{value:,.1f}"
    if 0.99995 <= size < 1:
        return f"{math.copysign(math.floor(size * 1e7) / 1e7, value):.7g}"
    return f"{value:.4f}"


def seconds(duration: float | None) -> str:
    """8.41 s, 85 s, 12 min 5 s, 3 h 12 min."""
    if duration is None:
        return ""
    if duration < 120:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.0f} s"
    minutes, rest = divmod(round(duration), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
