"""Compare the points of two runs, metric by metric: bitwise identical, within 1e-5, or the step at which they diverge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = tuple[NDArray[np.int64], NDArray[np.float64]]  # steps (n,), values (n,), in the order of writing

TOLERANCE = 1e-5
#: differences between smaller values are relative to this value: float32 rounds by 1e-7 around one, and losses are sums
SMALLEST = 0.01
#: a store replaces infinities by its largest number (MLflow 3: 1.7976931348623157e308)
LARGEST = float(np.finfo(np.float64).max)

SAME, CLOSE, DIFFERENT, NEW, NOT_COMPARED = "bitwise identical", "within 1e-5", "different", "new", "not compared"
#: metrics of the machine, which always differ, and those that `evaluate` of an earlier version added later
IGNORED_KEYS = ("speed/", "system/", "eval/")

TEST_PREFIX = "test/"


@dataclass(frozen=True)
class CurveComparison:
    """One metric of two runs."""

    name: str
    verdict: str
    num_common: int  # points of both
    num_missing: int  # points of the first run only
    num_additional: int  # points of the second run only
    largest: float  # difference, relative to the greater of the two values
    largest_step: int | None
    first_step: int | None  # with a difference, beyond the tolerance if there is such a step; None: no difference
    then: float | None = None  # the values at first_step; None: no point
    now: float | None = None
    parted_step: int | None = None  # the first common step with any difference
    parted_by: float = 0.0  # the relative difference there


def compare_all(
    then: Mapping[str, Points], now: Mapping[str, Points], *, may_end_elsewhere: bool = False
) -> list[CurveComparison]:
    """Compare every metric: `train/loss`, the other training metrics, and the rest in the second run's order.

    Only the last point of a test metric counts, as a resumed run may have several.

    Args:
        may_end_elsewhere: One run was stopped or is shorter, so points of only one run are not a difference.
    """
    names = [name for name in dict.fromkeys([*now, *then]) if not name.startswith(IGNORED_KEYS)]
    names.sort(key=lambda name: (name != "train/loss", not name.startswith("train/")))
    return [
        compare(name, _counted(then, name), _counted(now, name), may_end_elsewhere=may_end_elsewhere) for name in names
    ]


def compare(name: str, then: Points, now: Points, *, may_end_elsewhere: bool = False) -> CurveComparison:
    """Compare one metric step by step. NaN equals NaN; the last of several points at a step counts."""
    (old_steps, old), (new_steps, new) = _last_of_each_step(*then), _last_of_each_step(*now)
    steps, at_old, at_new = np.intersect1d(old_steps, new_steps, assume_unique=True, return_indices=True)
    missing, additional = np.setdiff1d(old_steps, steps), np.setdiff1d(new_steps, steps)
    old, new = old[at_old], new[at_new]
    apart = differences(old, new)
    is_beyond = apart > TOLERANCE
    first, parted = _first(steps, is_beyond), _first(steps, apart > 0)
    alone = missing if len(missing) else additional
    if not len(old_steps):
        verdict = NEW
    elif first is not None:
        verdict = DIFFERENT
    elif len(alone) and not may_end_elsewhere:
        verdict, first = DIFFERENT, int(alone[0])
    elif not len(steps):
        verdict = NOT_COMPARED
    else:
        first = parted
        verdict = SAME if first is None else CLOSE
    at = int(apart.argmax()) if apart.any() else None
    found = {"then": old, "now": new}
    values = {key: float(column[steps == first][0]) for key, column in found.items() if (steps == first).any()}
    return CurveComparison(
        name,
        verdict,
        num_common=len(steps),
        num_missing=len(missing),
        num_additional=len(additional),
        largest=float(apart[at]) if at is not None else 0.0,
        largest_step=int(steps[at]) if at is not None else None,
        first_step=first,
        parted_step=parted,
        parted_by=float(apart[steps == parted][0]) if parted is not None else 0.0,
        **values,
    )


def differences(
    then: NDArray[np.float64],  # (n,)
    now: NDArray[np.float64],  # (n,)
) -> NDArray[np.float64]:
    """Return (n,) |then - now|, relative to the greater value; infinite if only one is NaN or infinite."""
    then, now = _with_infinities(then), _with_infinities(now)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(then - now) / np.maximum(np.maximum(np.abs(then), np.abs(now)), SMALLEST)
    apart[np.isnan(apart)] = np.inf
    apart[(then == now) | (np.isnan(then) & np.isnan(now))] = 0.0
    return apart


def is_reproduced(found: list[CurveComparison]) -> bool:
    """Return whether anything was compared and nothing differs beyond the tolerance."""
    return all(each.verdict != DIFFERENT for each in found) and any(each.num_common for each in found)


def overall(found: list[CurveComparison]) -> str:
    """Return the worst verdict."""
    if not is_reproduced(found):
        return DIFFERENT
    return CLOSE if any(each.verdict == CLOSE for each in found) else SAME


def where_parted(found: list[CurveComparison]) -> CurveComparison | None:
    """Return the metric that diverges first, by any difference; the first in the list of several at one step."""
    parted = [each for each in found if each.parted_step is not None]
    return min(parted, key=lambda each: each.parted_step or 0, default=None)


def earliest(found: list[CurveComparison]) -> CurveComparison | None:
    """Return the metric that differs first; the first in the list of several at one step."""
    different = [each for each in found if each.verdict == DIFFERENT and each.first_step is not None]
    return min(different, key=lambda each: each.first_step or 0, default=None)


def last_step(series: Mapping[str, Points]) -> int:
    """Return the last step of any metric; 0 without points."""
    return max((int(steps.max()) for steps, _ in series.values() if len(steps)), default=0)


def _counted(series: Mapping[str, Points], name: str) -> Points:
    if name not in series:
        return np.array([], np.int64), np.array([], np.float64)
    steps, values = _last_of_each_step(*series[name])
    return (steps[-1:], values[-1:]) if name.startswith(TEST_PREFIX) else (steps, values)


def _first(steps: NDArray[np.int64], where: NDArray[np.bool_]) -> int | None:
    return int(steps[where][0]) if where.any() else None


def _with_infinities(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.abs(values) >= LARGEST, np.copysign(np.inf, values), values)


def _last_of_each_step(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Points:
    unique, last = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][last]
