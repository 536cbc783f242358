"""A call that is refused goes in; what is wrong with it comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runner.errors import Problem, RunnerError


def problems_of(call: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Problem, ...]:
    """What `call(*args, **settings)` is refused for."""
    with pytest.raises(RunnerError) as caught:
        call(*args, **settings)
    return caught.value.problems
