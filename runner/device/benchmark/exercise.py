"""A device goes in; the seconds of many products come out, each norm read by the host at once, or all at the end."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from runner.device.benchmark.sizes import Bench, Figures
from runner.device.benchmark.timing import once, spread, waiter


def exercise(bench: Bench) -> Figures:
    """Seconds of many products whose norms are logged: each read by the host at once, or all together at the end."""
    sizes, wait = bench.sizes, waiter(bench.device)
    left, right = (torch.randn(sizes.exercise_size, sizes.exercise_size, device=bench.device) for _ in range(2))
    ways = [partial(way, left, right, sizes.exercise_products) for way in (read_each, kept_on_device)]
    for way in ways:
        once(way, wait)
    pairs = [
        (once(ways[0], wait), once(ways[1], wait)) for _ in range(sizes.repeats)
    ]  # in turn: both meet the same noise
    return {
        "exercise.read_each_seconds": spread([each for each, _ in pairs]),
        "exercise.kept_on_device_seconds": spread([kept for _, kept in pairs]),
        "exercise.ratio": spread([each / kept for each, kept in pairs]),
    }


def read_each(left: Tensor, right: Tensor, num_products: int) -> list[float]:
    """The Frobenius norm of each product; the host waits for every one."""
    return [torch.linalg.matrix_norm(left @ right).item() for _ in range(num_products)]


def kept_on_device(left: Tensor, right: Tensor, num_products: int) -> list[float]:
    """The same; the host waits once."""
    log = torch.empty(num_products, device=left.device)
    for number in range(num_products):
        log[number] = torch.linalg.matrix_norm(left @ right)
    return [float(norm) for norm in log.tolist()]
