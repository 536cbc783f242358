"""Finds the largest batch that fits, from the memory of steps of some sizes that it asks for. Called by worker.py."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_ROWS = 2**24
MOST_TRIES = 12
CLOSE = 0.01  # of the answer: steps between are not tried


class OutOfTime(Exception):
    """The search was ended before it knew."""


def largest(peak_bytes: Callable[[int], int], usable_bytes: int, *, start: int, deadline: float) -> int:
    """The largest batch size whose step takes at most `usable_bytes`, within a percent; 0 where not even one row fits.

    Memory grows with a batch nearly in a straight line, so each guess is drawn through the two sizes next to the limit.
    deadline: by time.monotonic(). Raises: OutOfTime.
    """
    known: dict[int, int] = {}

    def fits(size: int) -> bool:
        if time.monotonic() > deadline:
            raise OutOfTime
        if size not in known:
            known[size] = peak_bytes(size)
        return known[size] <= usable_bytes

    good, bad = (start, 0) if fits(start) else (0, start)
    while bad == 0:
        if good >= MOST_ROWS:
            return good
        # where the line has led to the limit, only the step behind it is missing
        edge = good + max(1, int(good * CLOSE))
        following = min(MOST_ROWS, max(edge, _through(known, usable_bytes)) if len(known) > 1 else good * 2)
        good, bad = (following, 0) if fits(following) else (good, following)
    if good == 0 and bad > 1:
        if not fits(1):
            return 0
        good = 1
    for _ in range(MOST_TRIES):
        if bad - good <= max(1, int(good * CLOSE)):
            break
        guess = _through({good: known[good], bad: known[bad]}, usable_bytes) if good in known else (good + bad) // 2
        edge = max(1, (bad - good) // 50)
        guess = min(max(guess, good + edge), bad - edge)
        good, bad = (guess, bad) if fits(guess) else (good, guess)
    return good


def _through(known: dict[int, int], usable_bytes: int) -> int:
    if len(known) < 2:
        return 0
    (less, few), (more, many) = sorted(known.items())[-2:]
    if many <= few:
        return more * 8
    return less + int((usable_bytes - few) * (more - less) / (many - few))
