"""Chooses a learning rate from a range test's rates and losses, and says why. Pure. Called by lr_find.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.errors import RunnerError

#: of the running mean: each value counts with so much of what was before
MEMORY = 0.9
#: steps at the beginning and the end whose slope is not looked at: there the mean has only one side
EDGE = 3


@dataclass(frozen=True)
class Found:
    """A range test. Rates and losses are (n,)."""

    rates: Any
    losses: Any
    smoothed: Any
    steepest: float  # rate where the smoothed loss falls fastest by the rate's logarithm
    tenth_of_lowest: float
    lowest: float  # rate with the lowest smoothed loss
    suggested: float
    reason: str
    ending: str


def smoothed(losses: Any) -> Any:  # (n,) -> (n,)
    """The running mean, corrected for its beginning (Kingma & Ba 2015, section 3)."""
    values = np.empty(len(losses))
    mean = 0.0
    for number, loss in enumerate(losses):
        mean = MEMORY * mean + (1 - MEMORY) * float(loss)
        values[number] = mean / (1 - MEMORY ** (number + 1))
    return values


def suggest(rates: Any, losses: Any, *, away: float) -> Found:
    """Two rates that are worth a try, and the smaller of them (Smith 2017: the range test).

    away: a smoothed loss of so many times the lowest one ends the test; what comes after is not looked at.
    Raises: RunnerError where the loss never falls.
    """
    finite = np.isfinite(losses)
    end = len(losses) if finite.all() else int(np.flatnonzero(~finite)[0])
    ending = "to the highest rate" if end == len(losses) else f"until the loss was {losses[end]} at {rates[end]:.1e}"
    values = smoothed(losses[:end])
    for number in range(1, end):
        if values[: number + 1].min() > 0 and values[number] > away * values[: number + 1].min():
            end, ending = number + 1, f"until the loss had run away at {rates[number]:.1e}"
            break
    values = values[:end]
    if end < 2 * EDGE + 2 or values.argmin() < 2:
        last = max(0, end - 1)
        problem = f"the loss never falls: {losses[0]:.4g} at {rates[0]:.1e}, {losses[last]:.4g} at {rates[last]:.1e}"
        fix = f"use `lr-find --from {rates[0] / 100:.0e}` or more steps, or check the data and the task"
        raise RunnerError.of("lr-find", problem, fix)
    at = int(values.argmin())
    slope = np.gradient(values, np.log(rates[:end]))
    inner = slope[EDGE : max(EDGE + 1, min(at + 1, end - EDGE))]
    steep = EDGE + int(inner.argmin())
    steepest, tenth = float(rates[steep]), float(rates[at]) / 10
    suggested = min(steepest, tenth)
    is_steep = steepest <= tenth
    reason = "the smaller of the two: " + (
        "the loss falls fastest there"
        if is_steep
        else "from the lowest loss a tenth of the way back, far from where it rises"
    )
    return Found(rates[:end], losses[:end], values, steepest, tenth, float(rates[at]), suggested, reason, ending)
