"""The pause after a failed attempt. The uploader process has one for the store and one per run."""

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
        """Reset the pause after a success."""
        self._pause = FIRST_SECONDS
        self._last = time.monotonic()

    def pause_seconds(self) -> float:
        """Return the next pause, twice as long each time."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_SECONDS)
        return pause

    def silent_seconds(self, *, since: float = 0.0) -> float:
        """Return the seconds since the last success, or since `since` (of time.monotonic()) if that is later."""
        return time.monotonic() - max(self._last, since)
