"""Checks of single values of the configuration, whose RunnerError has the key and a value that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from runner.config.identity import as_typed
from runner.errors import Problem, RunnerError, nearest, nearest_files


def widths(values: Any, *, key: str, example: str) -> list[int]:
    """Return whole numbers, 1 or more each."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        fix = f"{key}=[{values}]" if str(values).isdecimal() else f"{key}={example}"
        problem = f"`{key}` must be a list of widths, one per layer"
        raise RunnerError.suggest(f"{key}={values}", problem, [fix])
    if bad := [value for value in values if type(value) is not int or value < 1]:
        problem = f"a width must be a whole number, 1 or more, not {bad[0]!r}"
        raise RunnerError.suggest(f"{key}=[{','.join(map(str, values))}]", problem, [f"{key}={example}"])
    return list(values)


def probability(value: Any, *, key: str) -> float:
    """Return a number of 0 or more and less than 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise RunnerError.suggest(f"{key}={value}", f"`{key}` must be 0 or more and less than 1", [f"{key}=0.1"])
    return float(value)


def count(value: Any, *, key: str, example: int = 64) -> int:
    """Return a whole number, 1 or more."""
    if type(value) is not int or value < 1:
        raise RunnerError.suggest(f"{key}={value}", f"`{key}` must be a whole number, 1 or more", [f"{key}={example}"])
    return value


def choice(value: Any, choices: Iterable[Any], *, key: str) -> Any:
    """Return one of the choices; the error has the nearest."""
    known = {str(one): one for one in choices}
    if str(value) not in known:
        ways = [f"{key}={hit}" for hit in nearest(str(value), known) or known]
        raise RunnerError.suggest(f"{key}={value}", f"`{key}` must be one of {', '.join(known)}", ways)
    return known[str(value)]


def no_such_file(source: str, file: Path, key: str, is_wanted: Callable[[Path], bool], otherwise: str) -> Problem:
    """Return the error of a path without a file, with the nearest names; without one, the help is `otherwise`."""
    folder, ways = file.parent, [as_typed(key, hit) for hit in nearest_files(file, is_wanted)]
    problem = f"there is no file `{file.name}` in {folder.resolve()}"
    if not folder.is_dir():
        problem = f"there is no directory `{folder}`"
        otherwise = f"use `{key}=FILE`, relative to the current directory ({Path.cwd()})"
    return Problem.suggest(source, problem, ways, otherwise, code="missing-file")
