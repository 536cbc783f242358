"""The logs of a run: Hydra configures them, and an error in their settings is reported with its key."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.errors import RunnerError, in_words


@contextmanager
def configured(key: str) -> Iterator[None]:
    """Report an error of the settings of a log with their key, e.g., hydra.job_logging. runner.config.trust has checked its classes."""
    try:
        yield
    except (
        OmegaConfBaseException,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        AssertionError,
        OSError,
    ) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        why = " ".join(f"{in_words(error).removeprefix('ValueError: ')}{cause}".split())
        problem, fix = (
            f"Python's logging refuses `{key}`: {why}",
            f"set `{key}` to other values, or choose a file: `{key.replace('.', '/')}=default`",
        )
        raise RunnerError.of(key, problem, fix, code="bad-value") from error


def files(hydra: DictConfig) -> dict[str, Path]:
    """Return the files of a run's log by key. hydra: With the run directory in it."""
    with configured("hydra.job_logging"):
        log: Any = OmegaConf.to_container(hydra.job_logging, resolve=True)
        handlers = (log.get("handlers") or {}) if log["root"] else {}
        return {
            f"hydra.job_logging.handlers.{name}.filename": Path(settings["filename"]).absolute()
            for name, settings in handlers.items()
            if "filename" in settings
        }


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
