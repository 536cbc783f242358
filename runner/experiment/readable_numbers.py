"""Writes a number in at most 10 characters, as a person reads it: on the screen, in a sweep's table and in its report."""

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
