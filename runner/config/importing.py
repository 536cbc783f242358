"""Changes of the process while a command runs: faster imports, importable user code, a restored environment, a log file."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def make_own_code_importable() -> None:
    """Let `runner` find the modules of the current directory, as `python -m runner` does."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


@contextmanager
def restored(variable: str) -> Iterator[None]:
    """Restore an environment variable afterwards."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


def log_file(folder: Path) -> logging.FileHandler:
    """Return what writes runner.log in Hydra's format."""
    handler = logging.FileHandler(folder / "runner.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
    return handler


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Write runner.log where Hydra does not."""
    root, handler = logging.getLogger(), log_file(folder)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
