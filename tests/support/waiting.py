"""A condition goes in; the test goes on when it has come true. No test ends because a machine is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

#: seconds for what must come (an end, an answer, a file): far beyond what a machine with five times its work needs
LONGEST = 600.0


def wait_for(condition: Callable[[], Found], what: str = "what was waited for", *, seconds: float = LONGEST) -> Found:
    """What `condition` gave when it was first true. Raises: AssertionError when it never was."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not come in {seconds:.0f} s: {what}"
        time.sleep(0.02)
    return found
