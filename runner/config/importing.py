"""Imports big packages faster: Python's garbage collector is off while they load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FEW_MODULES = 50


@contextmanager
def loading() -> Iterator[None]:
    """Turn Python's collector off, and restore its state: imports leave no garbage."""
    was_on, num_before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - num_before > FEW_MODULES:
            gc.freeze()
            gc.unfreeze()  # the first young collections would go through it, 0.4 s
        if was_on:
            gc.enable()
