"""The pauses between attempts to reach a store that has failed."""

from __future__ import annotations

import time

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0


class Backoff:
    """Pauses that double from one failed attempt to the next, up to five seconds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Note a success."""
        self._pause, self._last = FIRST_PAUSE_SECONDS, time.monotonic()

    def pause_seconds(self) -> float:
        """Return the next pause, twice as long each time."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return pause

    def silent_seconds(self, *, since: float = 0.0) -> float:
        """Return the seconds since the last success, or since `since` (of time.monotonic()) if that is later."""
        return time.monotonic() - max(self._last, since)
