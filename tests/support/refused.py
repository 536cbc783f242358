"""The errors of a refused call, and those in the JSON of a command."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

from runner.config.checks import argument_problems
from runner.errors import Problem, RunnerError

#: the keys of parts by their package
GROUPS = {"data": "data", "models": "model", "tasks": "task"}


def problems_before(call: Callable[..., Any], *args: Any, **settings: Any) -> list[Problem]:
    """Return the errors of a part of the runner that are found before it is built."""
    key = GROUPS.get(str(getattr(call, "__module__", "")).removeprefix("runner.").partition(".")[0])
    if key is None:
        return []
    return argument_problems(call, inspect.signature(call).bind(*args, **settings).arguments, key)


def problems_of(call: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Problem, ...]:
    """Return the errors of a call, or of a part those that are found before it is built."""
    if problems := problems_before(call, *args, **settings):
        return tuple(problems)
    with pytest.raises(RunnerError) as caught:
        call(*args, **settings)
    return caught.value.problems


def problems_in(output: str) -> tuple[Problem, ...]:
    """Return the errors that a command with --json has printed."""
    names = {"source": "asked"} | {name: name for name in ("message", "help", "suggestions", "notes", "code")}
    return tuple(Problem.of({name: each[key] for name, key in names.items()}) for each in json.loads(output)["faults"])
