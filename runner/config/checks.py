"""Checks the arguments of parts by their annotations, such as `depth: Count = 4`.

`argument_problems()` finds every bad value before anything is built.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

from runner.config.identity import as_text, as_typed
from runner.errors import Problem, nearest, nearest_files, refuse


@dataclass(frozen=True)
class Check:
    """Which values an argument takes."""

    accepts: Callable[[Any], bool]
    valid: str  # a sentence part: a whole number, 1 or more
    example: str
    #: values that a refused one may mean
    near: Callable[[Any], Iterable[Any]] = lambda value: ()
    #: the errors of a value, where they need more than the sentence
    explain: Callable[[Any], list[Problem]] | None = None

    def problems(self, value: Any, key: str, usual: Any = None) -> list[Problem]:
        """Return the error of a value, or nothing. usual: The argument's default, which is suggested if it is valid."""
        if self.accepts(value):
            return []
        if self.explain is not None:
            return self.explain(value)
        ways = [*self.near(value)] or [as_text(usual) if self.accepts(usual) else self.example]
        typed = [f'"{key}={way}"' if "'" in str(way) else f"{key}={way}" for way in ways]
        return [Problem.suggest(f"{key}={as_text(value)}", f"`{key}` must be {self.valid}", typed)]


def one_of(choices: Iterable[Any]) -> Check:
    """Return the check of an argument with a few values; the error has the nearest."""
    known = {str(each): each for each in choices}

    def near(value: Any) -> Iterable[str]:
        return nearest(str(value), known) or known

    return Check(lambda value: value in known.values(), f"one of {', '.join(known)}", "", near)


def at_least(least: int) -> Check:
    """Return the check of a whole number."""
    return Check(lambda value: type(value) is int and value >= least, f"a whole number, {least} or more", "64")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(COUNT.accepts, value))


def _as_one(value: Any) -> list[str]:
    return [f"[{value}]"] if str(value).isdecimal() else []


COUNT = at_least(1)
Count = Annotated[int, COUNT]
Positive = Annotated[float, Check(lambda value: _is_number(value) and value > 0, "more than 0", "1.0")]
SHARE = Check(
    lambda value: _is_number(value) and 0 <= value < 1, "0 or more and less than 1", "0.1", lambda value: ["0.1"]
)
#: a probability or another share
Share = Annotated[float, SHARE]
WIDTHS = Check(_is_list, "a list of widths, one per layer: whole numbers, 1 or more", "[64,64]", _as_one)
Widths = Annotated[Sequence[int], WIDTHS]


def argument_problems(target: Callable[..., Any], values: Mapping[str, Any], key: str) -> list[Problem]:
    """Return an error for each value that the annotation of its argument refuses.

    Args:
        target: The class or function.
        values: Its arguments. A `${...}` is checked when it is resolved, ??? is reported as missing, and null may be the
            default, or one of the annotation's types.
        key: The key above them.
    """
    problems: list[Problem] = []
    for name, argument in inspect.signature(target, eval_str=True).parameters.items():
        kinds, value = (argument.annotation, *get_args(argument.annotation)), values.get(name)  # Count, or Count | None
        checks = [each for kind in kinds for each in getattr(kind, "__metadata__", ()) if isinstance(each, Check)]
        may_be_null = argument.default is None or NoneType in get_args(argument.annotation)
        if checks and name in values and not (value is None and may_be_null):
            is_later = any(mark in str(value) for mark in ("???", "${"))
            for check in checks if not is_later else ():
                problems += check.problems(value, f"{key}.{name}", argument.default)
    return problems


def no_such_file(source: str, file: Path, key: str, is_wanted: Callable[[Path], bool], otherwise: str) -> Problem:
    """Return the error of a path without a file, with the nearest names; without one, the help is `otherwise`."""
    folder, ways = file.parent, [as_typed(key, hit) for hit in nearest_files(file, is_wanted)]
    problem = f"there is no file `{file.name}` in {folder.resolve()}"
    if not folder.is_dir():
        problem = f"there is no directory `{folder}`"
        otherwise = f"use `{key}=FILE`, relative to the current directory ({Path.cwd()})"
    return Problem.suggest(source, problem, ways, otherwise, code="missing-file")


def choice(value: Any, choices: Iterable[Any], *, key: str) -> Any:
    """Return one of the choices. Raises: RunnerError with the nearest."""
    refuse(one_of(choices).problems(value, key))
    return value
