"""Jobs that are equal but for their device: how much faster each is, and how far their curves lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runner.sweep.report.results import LOSS, Result
from runner.sweep.report.seeds import equal_but_for
from runner.tracking.journal_reader import Series, read_series


@dataclass(frozen=True)
class OnDevice:
    """One finished job beside its like on the reference device."""

    job: int
    device: str
    samples_per_second: float | None
    speed_up: float | None  # over the reference device
    seconds_to_best: float | None
    difference: float | None  # the largest between the loss curves; 0: equal to the bit; None: no common step
    difference_step: int | None
    num_steps_compared: int


@dataclass(frozen=True)
class Devices:
    """Finished jobs that are equal but for their device; the reference stands first."""

    name: str
    reference: str
    rows: tuple[OnDevice, ...]


@dataclass(frozen=True)
class Gain:
    """A device against a reference, over all their pairs."""

    device: str
    reference: str
    speed_up: float  # the median
    num_pairs: int
    difference: float | None  # the largest of all pairs; None: no common step


def over_devices(results: Sequence[Result], folder: Path) -> list[Devices]:
    """Sets of finished jobs on two or more devices; reads their journals again, for the whole curves.

    The reference is cpu, or the slowest device of the set where cpu is not in it.
    """
    found = []
    for name, group in equal_but_for("device", results).items():
        by_device: dict[str, Result] = {}
        for result in group:
            if result.device:
                by_device.setdefault(result.device, result)
        if len(by_device) > 1:
            found.append(_compare(name, by_device, folder))
    return found


def find_gains(sets: Sequence[Devices]) -> list[Gain]:
    """Each device against each reference, the fastest first."""
    pairs: dict[tuple[str, str], list[OnDevice]] = {}
    for each in sets:
        for row in each.rows[1:]:
            pairs.setdefault((row.device, each.reference), []).append(row)
    found = []
    for (device, reference), rows in pairs.items():
        factors = [row.speed_up for row in rows if row.speed_up is not None]
        differences = [row.difference for row in rows if row.difference is not None]
        if factors:
            largest = max(differences, default=None)
            found.append(Gain(device, reference, statistics.median(factors), len(factors), largest))
    return sorted(found, key=lambda gain: (-gain.speed_up, gain.device))


def largest_difference(one: Series, other: Series) -> tuple[float | None, int | None, int]:
    """Between two curves by step: (the largest absolute difference, its step, how many steps both have).

    inf where only one of them is finite; 0 where both are NaN.
    """
    steps, first, second = np.intersect1d(one[0], other[0], return_indices=True)
    if not len(steps):
        return None, None, 0
    a, b = one[2][first], other[2][second]
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        differences = np.where(equal, 0.0, np.abs(a - b))
    differences[np.isnan(differences)] = math.inf
    where = int(np.argmax(differences))
    return float(differences[where]), int(steps[where]), len(steps)


def _compare(name: str, by_device: dict[str, Result], folder: Path) -> Devices:
    reference = "cpu" if "cpu" in by_device else min(by_device, key=lambda device: _speed(by_device[device]))
    base = _speed(by_device[reference])
    losses = {device: read_series(folder / result.folder).get(LOSS) for device, result in by_device.items()}
    rows = []
    for device in (reference, *sorted(set(by_device) - {reference})):
        result, ours, theirs = by_device[device], losses[device], losses[reference]
        row = OnDevice(
            result.job,
            device,
            result.samples_per_second,
            _speed(result) / base if base and _speed(result) else None,
            result.best.seconds if result.best else None,
            *(largest_difference(ours, theirs) if ours and theirs else (None, None, 0)),
        )
        rows.append(row)
    return Devices(name, reference, tuple(rows))


def _speed(result: Result) -> float:
    return result.samples_per_second or 0.0
