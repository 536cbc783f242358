"""Makes a task of a user's function or module, and checks what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from runner.errors import RunnerError

FORM = '`def loss(model, batch): return {"loss": ..., "another metric": ...}`'


class Own(nn.Module):
    """Calls function(model, batch) -> {"loss": ..., name: ...}, 0-d tensors, means over the batch; or only the loss.

    With optimizer.turns it has a third parameter, turn=None: the name of the optimizer whose loss is requested. It must not
    read a tensor (.item(), if tensor > 0). A module is placed with the model; its parameters must be frozen.
    For metrics, plots and `predict` write a class with the methods of runner.tasks.task.Predicting instead, and use it as
    the task (task._target_=my_tasks.MyTask).
    """

    def __init__(self, function: Any) -> None:
        """Raises: RunnerError for what can't be called."""
        super().__init__()
        self.function: Callable[[nn.Module, Any], Any] = _callable(function)
        self.needs_grad = bool(getattr(getattr(function, "func", function), "needs_grad", False))

    def __call__(self, model: nn.Module, batch: Any, /, **turn: Any) -> dict[str, Tensor]:
        return _checked(self.function(model, batch, **turn), self.function)


def _callable(function: Any) -> Callable[[nn.Module, Any], Any]:
    made = function.func if isinstance(function, functools.partial) else function
    if isinstance(function, str):
        problem = "a text names nothing here; objects have their own _target_"
        raise RunnerError.suggest(f"task.function={function}", problem, [f"task.function._target_={function}"])
    if inspect.isclass(made):
        problem = f"{made.__name__} is a class, and with _partial_ one would be made in each step"
        raise RunnerError.suggest(f"task.function._target_={made.__name__}", problem, ["task.function._partial_=false"])
    if not callable(function):
        problem = f"`task.function` made a {type(function).__name__}, which can't be called"
        fix = f"use `task.function._partial_=true` for a function: {FORM}"
        raise RunnerError.of("task.function", problem, fix)
    return function  # type: ignore[no-any-return]


def _checked(values: Any, function: Any) -> dict[str, Tensor]:
    name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", "")
    source = f"task.function={name or type(function).__name__}"
    if isinstance(values, Tensor):
        values = {"loss": values}
    if not isinstance(values, Mapping) or "loss" not in values:
        names = f" of {', '.join(map(str, values))}" if isinstance(values, Mapping) else ""
        kind = "dict" if names else type(values).__name__
        raise RunnerError.of(source, f"the function returned a {kind}{names}, and no loss", f"write {FORM}")
    for key, value in values.items():
        if not isinstance(value, Tensor):
            problem = f"the value `{key}` is a {type(value).__name__}, and each value is a tensor, read later"
            raise RunnerError.of(source, problem, f"return `{key}` as it is computed, without `.item()` and `float()`")
        if value.dim():
            problem = f"the value `{key}` has the shape {tuple(value.shape)}, and each value is one number"
            raise RunnerError.of(source, problem, f"return `{key}.mean()`")
    return {"loss": values["loss"], **values}
