"""Checks the sizes that YAML gives for a model; a RunnerError says which are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runner.errors import Problem, RunnerError, nearest


def widths(values: Any, *, key: str, example: str) -> list[int]:
    """Whole numbers, 1 or more each. Raises: RunnerError."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        fix = f"{key}=[{values}]" if str(values).isdecimal() else f"{key}={example}"
        raise RunnerError(Problem(f"{key}={values}", f"`{key}` must be a list of widths, one per layer", fix))
    if bad := [value for value in values if type(value) is not int or value < 1]:
        problem = f"a width must be a whole number, 1 or more, not {bad[0]!r}"
        raise RunnerError(
            Problem(f"{key}=[{','.join(map(str, values))}]", problem, f"{key}={example}", code="bad-value")
        )
    return list(values)


def probability(value: Any, *, key: str) -> float:
    """0 or more and less than 1. Raises: RunnerError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise RunnerError(Problem(f"{key}={value}", f"`{key}` must be 0 or more and less than 1", f"{key}=0.1"))
    return float(value)


def count(value: Any, *, key: str, example: int = 64) -> int:
    """A whole number, 1 or more. Raises: RunnerError."""
    if type(value) is not int or value < 1:
        raise RunnerError(
            Problem(
                f"{key}={value}", f"`{key}` must be a whole number, 1 or more", f"{key}={example}", code="bad-value"
            )
        )
    return value


def choice(value: Any, choices: Iterable[Any], *, key: str) -> Any:
    """One of the choices. Raises: RunnerError with the nearest."""
    known = {str(one): one for one in choices}
    if str(value) not in known:
        fix = " or ".join(f"{key}={hit}" for hit in nearest(str(value), known) or known)
        raise RunnerError(
            Problem(f"{key}={value}", f"`{key}` must be one of {', '.join(known)}", fix, code="bad-value")
        )
    return known[str(value)]
