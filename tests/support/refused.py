"""The errors of a refused call, and those in the JSON of a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runner.errors import Problem, RunnerError


def problems_of(call: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Problem, ...]:
    with pytest.raises(RunnerError) as caught:
        call(*args, **settings)
    return caught.value.problems


def problems_in(output: str) -> tuple[Problem, ...]:
    """Return the errors that a command with --json has printed."""
    names = {"source": "asked"} | {name: name for name in ("message", "help", "suggestions", "notes", "code")}
    return tuple(Problem.of({name: each[key] for name, key in names.items()}) for each in json.loads(output)["faults"])
