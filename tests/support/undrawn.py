"""A run's pictures become one white dot: to render them was half of a short run (0.4 of 0.8 s, 2026-11), and few tests look at one.

What is to be drawn is still put together, and its file still written. A test that looks at the ink takes the fixture `ink`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.experiment.plots import style

SAVE = style.save
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="


def leave_undrawn() -> None:
    """From now on, in this process and in its forks."""
    style.save = _dot


@contextmanager
def rendered() -> Iterator[None]:
    style.save = SAVE
    try:
        yield
    finally:
        leave_undrawn()


def _dot(figure: Any, path: Path) -> Path:
    path.write_bytes(base64.b64decode(DOT))
    return path
