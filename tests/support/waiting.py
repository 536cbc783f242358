"""Wait until a condition is true, with a limit that no slow machine reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

#: seconds for an expected event (an end, an answer, a file): far more than a machine with five times its load needs
LONGEST = 600.0
#: processes that remain for later tests, and are not reported as leaks
STAYING: set[int] = set()


def wait_for(condition: Callable[[], Found], what: str = "what was waited for", *, seconds: float = LONGEST) -> Found:
    """Return the first true result of `condition`. Raises: AssertionError if it never becomes true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not come in {seconds:.0f} s: {what}"
        time.sleep(0.02)
    return found
