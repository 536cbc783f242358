"""How long to pause after an attempt that failed. The publishing process has one for the store and one for each run."""

from __future__ import annotations

import time

FIRST_SECONDS = 0.2
LONGEST_SECONDS = 5.0


class Backoff:
    """Pauses that double from one failed attempt to the next, up to five seconds."""

    def __init__(self) -> None:
        self._pause = FIRST_SECONDS
        self._last = time.monotonic()

    def worked(self) -> None:
        """Something got through."""
        self._pause = FIRST_SECONDS
        self._last = time.monotonic()

    def pause_seconds(self) -> float:
        """How long to pause now; longer the next time."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_SECONDS)
        return pause

    def silent_seconds(self, *, since: float = 0.0) -> float:
        """For how long nothing has worked, counted from `since` (of time.monotonic()) at the earliest."""
        return time.monotonic() - max(self._last, since)
