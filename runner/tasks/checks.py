"""Checks of a task's settings, batches and outputs, each with a RunnerError that names the fix."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from runner.errors import RunnerError, nearest
from runner.tasks.metric_names import PLOTS

#: a count that is not known, since the task was made in code, without the data's facts
UNKNOWN = -1
#: usual names of a model's argument for the number of its outputs
OUTPUTS = ("out_features", "outputs", "num_classes", "n_classes", "num_outputs", "out_dim", "output_size", "num_labels")


def plots_of(requested: Any, *, kind: str) -> tuple[str, ...]:
    """Return the plots to draw at the end of a run.

    Args:
        requested: True (all plots of this kind of task), False, or their names.

    Raises:
        RunnerError: This kind of task has no plot of a name.
    """
    known = PLOTS.get(kind, ())
    if isinstance(requested, bool) or requested is None:
        return known if requested else ()
    names = list(requested) if isinstance(requested, Iterable) and not isinstance(requested, str) else [requested]
    if unknown := [name for name in names if name not in known]:
        problem = f"plots of this kind of task, {kind}, are {', '.join(known) or 'not available'}"
        ways = [*(f"task.plots=[{hit}]" for hit in nearest(str(unknown[0]), known)), "task.plots=true"]
        raise RunnerError.suggest(f"task.plots={unknown[0]}", problem, ways)
    return tuple(names)


def trains_nothing(task: Any) -> None:
    """Refuse a task with trained weights: the optimizer, the averaging and the checkpoints only have the model's.

    Frozen weights are allowed, e.g., a network that a loss compares with. Raises: RunnerError.
    """
    parameters = task.named_parameters() if isinstance(task, nn.Module) else ()
    if names := ", ".join([name for name, parameter in parameters if parameter.requires_grad][:3]):
        problem = f"the task has parameters to learn ({names}), and only the model's are trained and kept"
        fix = (
            "make them parameters of your model, which the task gets (`model.log_scale`), or set `requires_grad=False`"
        )
        raise RunnerError.of(f"task={type(task).__name__}", problem, fix)


def check_turns(task: Any, turns: Sequence[str]) -> None:
    """Refuse a task whose losses are not those of the optimizers that take turns.

    Args:
        turns: Names of the optimizers, empty for one optimizer.

    Raises:
        RunnerError: With the fix.
    """
    name, required = type(task).__name__, getattr(task, "turns", None)
    if required is not None and set(required) != set(turns):
        has = f"optimizer.turns has {', '.join(turns)}" if turns else "there is one optimizer"
        example = ", ".join(f"{each}: {{params: {each}}}" for each in required)
        problem = f"the task has a loss for each of {' and '.join(required)}, and {has}"
        raise RunnerError.suggest(f"task={name}", problem, [f"optimizer.turns={{{example}}}"])
    call = getattr(task, "function", task)
    parameters = inspect.signature(call).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    takes_turn = "turn" in parameters and parameters["turn"].default is not inspect.Parameter.empty
    if turns and not takes_any and not takes_turn:
        problem = f"the task does not say which loss is that of {' and which that of '.join(turns)}"
        fix = f"use `def loss(model, batch, turn=None)` with turn {', '.join(turns)} or None (to measure), or `optimizer.turns=null`"
        raise RunnerError.of(f"optimizer.turns with task={getattr(call, '__name__', name)}", problem, fix)


def shares_tensors(task: Any) -> bool:
    """Return whether a task takes `shared`, a dict for what its turns compute once for all."""
    return "shared" in inspect.signature(getattr(task, "function", task)).parameters


def inputs_of(batch: Any, *, task: str) -> Any:
    """Return what the model gets of a batch (inputs, targets). Raises: RunnerError for another form."""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[0]
    problem = f"a batch is {described(batch)}, and this task takes (inputs, targets)"
    fix = (
        "use a collate_fn or rows that give (inputs, targets), or a custom task: `task=own task.function._target_=...`"
    )
    raise RunnerError.of(f"task={task}", problem, fix)


def output_of(outputs: Any, key: int | str | None, *, task: str) -> Tensor:
    """Return a model's output, or the one that `task.output` names. Only looks at types and shapes.

    Args:
        key: The number in a tuple or list, the key of a dict or the name of an attribute; None: the output is a tensor.

    Raises:
        RunnerError: The model returned something else, which the error describes.
    """
    if key is None and isinstance(outputs, Tensor):
        return outputs
    tensors = {name: part for name, part in _parts(outputs) if isinstance(part, Tensor)}
    if key is not None and key in tensors:
        return tensors[key]
    problem, fix = f"the model gives {described(outputs)}", "use a model that returns one tensor"
    if key is None:
        if tensors:
            choices = " or ".join(f"`task.output={name}`" for name in [*tensors][:3])
            fix = f"use {choices} to take one of them, or a model that returns one tensor"
        elif outputs is None:
            fix = "return one tensor from `forward`"
        raise RunnerError.of(f"task={task}", problem, fix)
    source, names = f"task={task} task.output={key}", [str(name) for name in tensors]
    if isinstance(outputs, Tensor):
        raise RunnerError.suggest(source, f"{problem}, and nothing is to be taken out of it", ["task.output=null"])
    ways = [f"task.output={hit}" for hit in nearest(str(key), names) or names[:3]]
    raise RunnerError.suggest(source, f"{problem}, and no tensor in it is called {key}", ways, fix)


def wider(model: nn.Module, count: int) -> str:
    """Return the fix for a model whose number of outputs is wrong: its own argument for that, if it has one."""
    if type(model).__name__ == "Prepared" and isinstance(model.model, nn.Module):  # tasks don't import models
        model = model.model
    arguments = inspect.signature(type(model)).parameters
    if name := next((name for name in OUTPUTS if name in arguments), None):
        if type(model).__module__.startswith("runner."):
            return f"use `model.{name}='${{facts.out_features}}'`"
        return (
            f"use `++model.{name}='${{facts.out_features}}'`, and return that many scores from {type(model).__name__}"
        )
    return f"use a last layer with {count} outputs in {type(model).__name__}, e.g., nn.Linear(..., {count})"


def described(value: Any) -> str:
    """Describe a batch or outputs: a tuple of a tensor (64, 10) and a tensor (64, 10)."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        parts = " and ".join(described(part) for part in value) or "nothing"
    else:
        parts = ", ".join(f"{key}: {described(part)}" for key, part in _parts(value)[:6])
    return "None" if value is None else f"a {type(value).__name__}" + (f" of {parts}" if parts else "")


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):  # a NamedTuple: by number and by name
        return [*enumerate(value), *zip(getattr(value, "_fields", ()), value, strict=False)]
    return [] if isinstance(value, Tensor) else list(getattr(value, "__dict__", {}).items())
