"""Checks Hydra's settings of its two logs, and reports an error with its key.

Hydra reports an error without a key, and late: when the run directory exists. So each part of a log is made here first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.errors import Problem, in_words

LOGS = ("hydra_logging", "job_logging")
PARTS = ("formatters", "filters", "handlers")  # in order: each may name earlier ones


def problems(hydra: DictConfig) -> list[Problem]:
    """Return the first error of each log, and that of hydra.verbose. runner.config.trust has checked classes and levels."""
    found = [_log_problem(f"hydra.{name}", _plain(hydra, name)) for name in LOGS]
    verbose = _plain(hydra, "verbose")
    if not all(isinstance(name, bool | str) for name in (verbose if isinstance(verbose, list) else [verbose])):
        problem = "`hydra.verbose` must be true, false or the names of the logs to print completely"
        found.append(Problem.suggest(f"hydra.verbose={_shown(verbose)}", problem, ["hydra.verbose=true"]))
    return [problem for problem in found if problem is not None]


def files(hydra: DictConfig) -> dict[str, Path]:
    """Return the files of a run's log by key. hydra: With the run directory in it."""
    log = _plain(hydra, "job_logging")
    handlers = (log.get("handlers") or {}) if log["root"] else {}
    return {
        f"hydra.job_logging.handlers.{name}.filename": Path(settings["filename"]).absolute()
        for name, settings in handlers.items()
        if "filename" in settings
    }


def _plain(node: Any, key: Any) -> Any:
    try:
        value = node[key]
    except OmegaConfBaseException:
        return node._get_node(key, validate_access=False)._value() if OmegaConf.is_dict(node) else str(node)
    if OmegaConf.is_dict(value):
        return {inner: _plain(value, inner) for inner in value}
    return [_plain(value, index) for index in range(len(value))] if OmegaConf.is_list(value) else value


def _log_problem(key: str, log: Any) -> Problem | None:
    place, value = key, log
    try:
        if log["root"] is None:
            return None  # Hydra ignores the rest
        if log.get("version") != 1 or log.get("incremental"):
            raise ValueError("a log has version 1, and is not incremental")
        made: dict[str, dict[str, Any]] = {kind: {} for kind in PARTS}
        for kind in PARTS:
            place, value = f"{key}.{kind}", log.get(kind)
            for name, settings in (value or {}).items():
                place, value = f"{key}.{kind}.{name}", settings
                made[kind][name] = _made(kind, value, made)
        loggers = {f"{key}.loggers.{name}": each for name, each in (log.get("loggers") or {}).items()}
        for name, logger in {**loggers, f"{key}.root": log["root"]}.items():
            place, value = name, logger
            logging.Logger(name).setLevel(logger.get("level", logging.NOTSET))
            for kind in ("handlers", "filters"):
                if unknown := [each for each in logger.get(kind) or [] if each not in made[kind]]:
                    raise ValueError(f"there is no `{unknown[0]}` in {kind}: {', '.join(made[kind]) or 'none'}")
    except Exception as error:  # from any class of a log
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        why = " ".join(f"{in_words(error).removeprefix('ValueError: ')}{cause}".split())
        problem, fix = f"Python's logging refuses `{place}`: {why}", f"set `{place}` to other values"
        return Problem(f"{place}={_shown(value)}", problem, fix, code="bad-value")
    return None


def _made(kind: str, settings: Any, made: dict[str, dict[str, Any]]) -> Any:
    from hydra._internal.logging_config import HydraDictConfigurator  # with Hydra's own rules

    if "filename" in settings:
        if not isinstance(settings["filename"], str):
            raise ValueError("the filename must be a text")
        settings = settings | {"filename": os.devnull, "mode": str(settings.get("mode", "a")).replace("x", "w")}
    maker = HydraDictConfigurator({**made, "new": dict(settings)})
    part = getattr(maker, f"configure_{kind[:-1]}")(maker.config["new"])
    if isinstance(part, logging.Handler):
        part.close()
    return part


def _shown(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("...\n").strip()


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
