"""Checks what YAML says of a task; a RunnerError says what does not suit it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from runner.errors import RunnerError, nearest
from runner.tasks.metric_names import PLOTS

#: a count that is not known: the task was made in code, without the data's facts
UNKNOWN = -1
#: usual names of a model's argument for the number of its outputs
OUTPUTS = ("out_features", "outputs", "num_classes", "n_classes", "num_outputs", "out_dim", "output_size", "num_labels")


def plots_of(asked: Any, *, kind: str) -> tuple[str, ...]:
    """The pictures to draw at the end of a run. asked: true (all that suit the kind of task), false, or their names.

    Raises: RunnerError for a name that this kind of task has no picture of.
    """
    can = PLOTS.get(kind, ())
    if isinstance(asked, bool) or asked is None:
        return can if asked else ()
    names = [asked] if isinstance(asked, str) else list(asked) if isinstance(asked, Iterable) else [asked]
    if bad := [name for name in names if name not in can]:
        problem = f"plots of this kind of task, {kind}, are {', '.join(can) or 'not available'}"
        ways = [*(f"task.plots=[{hit}]" for hit in nearest(str(bad[0]), can)), "task.plots=true"]
        raise RunnerError.suggest(f"task.plots={bad[0]}", problem, ways)
    return tuple(names)


def trains_nothing(task: Any) -> None:
    """Refuse a task with trained weights: the optimizer, the averaging and the checkpoints only have the model's.

    Frozen ones are welcome, e.g. a network that a loss compares with. Raises: RunnerError.
    """
    if not isinstance(task, nn.Module):
        return
    if learned := [name for name, parameter in task.named_parameters() if parameter.requires_grad]:
        problem = (
            f"the task has parameters to learn ({', '.join(learned[:3])}), and only the model's are trained and kept"
        )
        fix = (
            "make them parameters of your model, which the task gets (`model.log_scale`), or set `requires_grad=False`"
        )
        raise RunnerError.of(f"task={type(task).__name__}", problem, fix)


def check_turns(task: Any, turns: Sequence[str]) -> None:
    """Refuse a task whose losses are not those of the optimizers that take turns. turns: their names, empty for one optimizer.

    Raises: RunnerError.
    """
    name, wanted = type(task).__name__, getattr(task, "turns", None)
    if wanted is not None and set(wanted) != set(turns):
        has = f"optimizer.turns has {', '.join(turns)}" if turns else "there is one optimizer"
        example = ", ".join(f"{each}: {{params: {each}}}" for each in wanted)
        problem = f"the task has a loss for each of {' and '.join(wanted)}, and {has}"
        raise RunnerError.suggest(f"task={name}", problem, [f"optimizer.turns={{{example}}}"])
    call = getattr(task, "function", task)
    known = inspect.signature(call).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    if turns and not takes_any and ("turn" not in known or known["turn"].default is inspect.Parameter.empty):
        problem = f"the task does not say which loss is that of {' and which that of '.join(turns)}"
        fix = f"use `def loss(model, batch, turn=None)` with turn {', '.join(turns)} or None (to measure), or `optimizer.turns=null`"
        raise RunnerError.of(f"optimizer.turns with task={getattr(call, '__name__', name)}", problem, fix)


def shares_tensors(task: Any) -> bool:
    """Return whether a task takes `shared`, a dict for what its turns compute once for all."""
    return "shared" in inspect.signature(getattr(task, "function", task)).parameters


def inputs_of(batch: Any, *, task: str) -> Any:
    """What the model gets of a batch (inputs, targets). Raises: RunnerError with what it is instead."""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[0]
    problem = f"a batch is {described(batch)}, and this task takes (inputs, targets)"
    fix = (
        "use a collate_fn or rows that give (inputs, targets), or a custom task: `task=own task.function._target_=...`"
    )
    raise RunnerError.of(f"task={task}", problem, fix)


def output_of(found: Any, chosen: int | str | None, *, task: str) -> Tensor:
    """Return a model's output, or the one that `task.output` names. Only looks at types and shapes.

    chosen: a place in a tuple or list, a key of a dict or the name of an attribute; None: it is a tensor as it is.
    Raises: RunnerError with what came back.
    """
    if chosen is None and isinstance(found, Tensor):
        return found
    asked = f"task={task}" if chosen is None else f"task={task} task.output={chosen}"
    problem, fix = f"the model gives {described(found)}", "use a model that returns one tensor"
    if chosen is None:
        if choices := [f"task.output={key}" for key, part in _parts(found) if isinstance(part, Tensor)]:
            fix = f"use {' or '.join(f'`{each}`' for each in choices[:3])} to take one of them, or a model that returns one tensor"
        elif found is None:
            problem, fix = "the model gives None", "return one tensor from `forward`"
        raise RunnerError.of(asked, problem, fix)
    taken = dict(_parts(found)).get(chosen)
    if isinstance(taken, Tensor):
        return taken
    if isinstance(found, Tensor):
        raise RunnerError.suggest(asked, f"{problem}, and nothing is to be taken out of it", ["task.output=null"])
    names = [str(key) for key, part in _parts(found) if isinstance(part, Tensor)]
    hits = nearest(str(chosen), names) or names[:3]
    problem += f", and no tensor in it is called {chosen}"
    raise RunnerError.suggest(asked, problem, (f"task.output={hit}" for hit in hits), fix)


def wider(model: nn.Module, count: int) -> str:
    """What to write for a model whose number of outputs is wrong: its own argument for that, where it has one."""
    if type(model).__name__ == "Prepared" and isinstance(model.model, nn.Module):  # tasks don't import models
        model = model.model
    arguments = inspect.signature(type(model)).parameters
    if name := next((name for name in OUTPUTS if name in arguments), None):
        is_ours = type(model).__module__.startswith("runner.")
        return f"use `{'' if is_ours else '++'}model.{name}='${{facts.out_features}}'`"
    return f"use a last layer with {count} outputs in {type(model).__name__}, e.g., nn.Linear(..., {count})"


def described(found: Any) -> str:
    """Describe outputs: a tuple of a tensor (64, 10) and a tensor (64, 10)."""
    if isinstance(found, Tensor):
        return f"a tensor {tuple(found.shape)}"
    parts = _parts(found)
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of {' and '.join(described(part) for _, part in parts) or 'nothing'}"
    if parts:
        return f"a {type(found).__name__} of {', '.join(f'{key}: {described(part)}' for key, part in parts[:6])}"
    return "None" if found is None else f"a {type(found).__name__}"


def _parts(found: Any) -> list[tuple[int | str, Any]]:
    if isinstance(found, Mapping):
        return list(found.items())
    if isinstance(found, list | tuple) and not hasattr(found, "_fields"):
        return list(enumerate(found))
    if isinstance(found, tuple):  # a NamedTuple, by place and by name
        return [*enumerate(found), *zip(getattr(found, "_fields", ()), found, strict=True)]
    return [] if isinstance(found, Tensor) else list(getattr(found, "__dict__", {}).items())
