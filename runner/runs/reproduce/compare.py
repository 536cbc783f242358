"""Compares the points of two runs, metric by metric: to the bit, within 1e-5, or where they part first. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = tuple[NDArray[np.int64], NDArray[np.float64]]  # steps (n,), values (n,), in the order of writing

TOLERANCE = 1e-5
#: differences of smaller values are measured against this one: float32 rounds by 1e-7 around one, and losses are sums
SMALLEST = 0.01
#: a store keeps infinities as the largest number that it has (MLflow 3: 1.7976931348623157e308)
LARGEST = float(np.finfo(np.float64).max)

SAME, CLOSE, DIFFERENT, NEW, NOT_COMPARED = "to the bit", "within 1e-5", "different", "new", "not compared"
#: of the machine, and never twice the same; and what `evaluate --track` has added afterwards
NOT_OF_THE_RUN = ("speed/", "system/", "eval/")

AT_THE_END = "test/"


@dataclass(frozen=True)
class Comparison:
    """One metric of two runs."""

    name: str
    verdict: str
    num_common: int  # points that both have
    num_missing: int  # that the first one has alone
    num_additional: int  # that the second one has alone
    largest: float  # difference, relative to the greater of the two values
    largest_step: int | None
    first_step: int | None  # with a difference: beyond the tolerance, where there is one; None: all are the same
    then: float | None = None  # the values at first_step; None: no point
    now: float | None = None
    parted_step: int | None = None  # the first one with any difference at all, where both have a point
    parted_by: float = 0.0  # that difference, likewise relative


def compare_all(
    then: Mapping[str, Points], now: Mapping[str, Points], *, may_end_elsewhere: bool = False
) -> list[Comparison]:
    """Every metric of the run itself: training's first, led by its loss, then the others, in the second run's order.

    Of a test, which a run makes at its end, the last one counts: a run that was resumed has ended more than once.
    may_end_elsewhere: one of them was stopped or was to be shorter, so that points of the other alone are no difference.
    """
    names = [name for name in dict.fromkeys([*now, *then]) if not name.startswith(NOT_OF_THE_RUN)]
    names.sort(key=lambda name: (name != "train/loss", not name.startswith("train/")))
    return [
        compare(name, _counted(then, name), _counted(now, name), may_end_elsewhere=may_end_elsewhere) for name in names
    ]


def compare(name: str, then: Points, now: Points, *, may_end_elsewhere: bool = False) -> Comparison:
    """One metric, step by step. NaN agrees with NaN; of a step with several points the last one counts."""
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
    return Comparison(
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
    """(n,) |then - now|, relative to the greater of them; infinite where one alone is NaN or infinite."""
    then, now = _with_infinities(then), _with_infinities(now)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(then - now) / np.maximum(np.maximum(np.abs(then), np.abs(now)), SMALLEST)
    apart[np.isnan(apart)] = np.inf
    apart[(then == now) | (np.isnan(then) & np.isnan(now))] = 0.0
    return apart


def is_reproduced(found: list[Comparison]) -> bool:
    """Whether nothing differs beyond the tolerance, and something was compared."""
    return all(each.verdict != DIFFERENT for each in found) and any(each.num_common for each in found)


def overall(found: list[Comparison]) -> str:
    """The verdict on all of them: the worst of the single ones."""
    if not is_reproduced(found):
        return DIFFERENT
    return CLOSE if any(each.verdict == CLOSE for each in found) else SAME


def where_parted(found: list[Comparison]) -> Comparison | None:
    """The metric that parts first, by however little; of several at one step the first in the list."""
    parted = [each for each in found if each.parted_step is not None]
    return min(parted, key=lambda each: each.parted_step or 0, default=None)


def earliest(found: list[Comparison]) -> Comparison | None:
    """The metric that differs first; of several at one step the first in the list."""
    different = [each for each in found if each.verdict == DIFFERENT and each.first_step is not None]
    return min(different, key=lambda each: each.first_step or 0, default=None)


def last_step(series: Mapping[str, Points]) -> int:
    """The last step that any metric has; 0 without points."""
    return max((int(steps.max()) for steps, _ in series.values() if len(steps)), default=0)


def _counted(series: Mapping[str, Points], name: str) -> Points:
    if name not in series:
        return np.array([], np.int64), np.array([], np.float64)
    steps, values = _last_of_each_step(*series[name])
    return (steps[-1:], values[-1:]) if name.startswith(AT_THE_END) else (steps, values)


def _first(steps: NDArray[np.int64], where: NDArray[np.bool_]) -> int | None:
    return int(steps[where][0]) if where.any() else None


def _with_infinities(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.abs(values) >= LARGEST, np.copysign(np.inf, values), values)


def _last_of_each_step(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Points:
    unique, last = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][last]
