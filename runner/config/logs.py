"""Checks Hydra's settings of its two logs, and reports every error with its key.

Hydra reports an error without a key, and late: when the run directory exists. So each part of a log is made here first, and
writes one line to nowhere.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.errors import Problem, nearest

LOGS = ("hydra_logging", "job_logging")
PARTS = ("formatters", "filters", "handlers")  # in order: each may name earlier ones
LINE = logging.LogRecord("runner", logging.INFO, __file__, 1, "a line", None, None)


def problems(hydra: DictConfig) -> list[Problem]:
    """Return every error of both logs and of hydra.verbose. runner.config.trust has checked classes and levels."""
    found = [error for name in LOGS for error in _log_problems(f"hydra.{name}", _plain(hydra, name))]
    verbose = _plain(hydra, "verbose")
    if not all(isinstance(name, bool | str) for name in (verbose if isinstance(verbose, list) else [verbose])):
        problem = "it must be true, false or the names of the logs to print completely"
        found.append(
            Problem(f"hydra.verbose={_shown(verbose)}", problem, "hydra.verbose=true, or hydra.verbose=[NAME]")
        )
    return found


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


def _log_problems(key: str, log: Any) -> Iterator[Problem]:
    if not isinstance(log, dict) or "root" not in log:
        problem = "a log has a root, or `root: null` for no log"
        yield Problem(f"{key}={_shown(log)}", problem, f"{key}.root=null")
        return
    if log["root"] is None:
        return  # Hydra ignores the rest
    if log.get("version") != 1:
        problem = "Python's logging knows no version but 1"
        yield Problem(f"{key}.version={_shown(log.get('version'))}", problem, f"{key}.version=1")
    if log.get("incremental"):
        yield Problem(
            f"{key}.incremental={_shown(log['incremental'])}",
            "a log can't be changed by increments: none precedes it",
            "leave it out",
        )
    made: dict[str, dict[str, Any]] = {kind: {} for kind in PARTS}
    for kind in (*PARTS, "loggers"):
        settings = log.get(kind)
        if not isinstance(settings, dict | None):
            yield Problem(f"{key}.{kind}={_shown(settings)}", "it is a group of keys", f"{key}.{kind}={{}}")
            return
        for name, values in (settings or {}).items():
            if kind == "loggers":
                yield from _logger_problems(f"{key}.loggers.{name}", values, made)
            elif why := _refusal(kind, name, values, made):
                asked = f"{key}.{kind}.{name}={_shown(values)}"
                fix = f"{key}.{kind}.{name}={{...}} with other values"
                yield Problem(asked, f"Python's logging refuses it: {why}", fix)
    yield from _logger_problems(f"{key}.root", log["root"], made)


def _logger_problems(key: str, logger: Any, made: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    if not isinstance(logger, dict):
        yield Problem(f"{key}={_shown(logger)}", "it is a group of keys", f"{key}.level=INFO")
        return
    for kind in ("handlers", "filters"):
        given, known = logger.get(kind) or [], list(made[kind])
        wrong = [name for name in given if name not in known] if isinstance(given, list) else [given]
        if wrong:
            hits = nearest(str(wrong[0]), known) or known[:1]
            problem = f"it is a list of this log's {kind}, and they are: {', '.join(known) or 'none'}"
            yield Problem(f"{key}.{kind}={_shown(given)}", problem, f"{key}.{kind}=[{', '.join(hits[:1])}]")


def _refusal(kind: str, name: str, settings: Any, made: dict[str, dict[str, Any]]) -> str:
    from hydra._internal.logging_config import HydraDictConfigurator  # with Hydra's own rules

    made[kind][name] = None  # the parts that name it need no error
    if not isinstance(settings, dict):
        return "it is a group of keys"
    if "filename" in settings:
        if not isinstance(settings["filename"], str):
            return f"filename is a text, and {_shown(settings['filename'])} is not"
        settings = settings | {"filename": os.devnull, "mode": str(settings.get("mode", "a")).replace("x", "w")}
    try:
        maker = HydraDictConfigurator({**made, "new": dict(settings)})
        part = getattr(maker, f"configure_{kind[:-1]}")(maker.config["new"])
        if kind == "formatters":
            part.format(LINE)
        elif kind == "handlers":
            _write(part)
    except Exception as error:  # from any class of a log
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        return " ".join(f"{str(error) or type(error).__name__}{cause}".split())
    made[kind][name] = part
    return ""


def _write(handler: logging.Handler) -> None:
    handler.handleError = _raise  # type: ignore[method-assign]
    if type(handler) is logging.StreamHandler:
        handler.setStream(io.StringIO())
    try:
        if isinstance(handler, logging.StreamHandler):
            handler.emit(LINE)
    finally:
        handler.close()


def _raise(record: logging.LogRecord) -> None:
    raise  # the error that the handler has caught


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
