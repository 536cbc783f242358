"""Makes imports of big packages faster: Python's garbage collector is off meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FEW_MODULES = 50


@contextmanager
def loading() -> Iterator[None]:
    """Keep Python's collector off, as imports leave no garbage, and restore its state."""
    was_on, num_before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - num_before > FEW_MODULES:  # else a process that has frozen what it holds keeps that so
            gc.freeze()
            gc.unfreeze()  # all of it is old now: the first young collections would go through it, 0.4 s
        if was_on:
            gc.enable()
