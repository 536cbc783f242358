"""The logs of a run: Hydra configures them, and an error in their settings is reported with its key."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from runner.errors import RunnerError, in_words

#: what Python's logging raises for settings
REFUSALS = (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError)


@contextmanager
def configured(key: str) -> Iterator[None]:
    """Report an error of the settings of a log with their key, e.g., hydra.job_logging. runner.config.trust has checked its classes."""
    try:
        yield
    except (OmegaConfBaseException, *REFUSALS) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        problem = f"Python's logging refuses `{key}`: {in_words(error).removeprefix('ValueError: ')}{cause}"
        fix = f"set `{key}` to other values, or choose a file: `{key.replace('.', '/')}=default`"
        raise RunnerError.of(key, " ".join(problem.split()), fix, code="bad-value") from error


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Write runner.log where Hydra does not."""
    root = logging.getLogger()
    handler, level = logging.FileHandler(folder / "runner.log", encoding="utf-8", delay=True), root.level
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
