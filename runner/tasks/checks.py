"""What YAML says of a task goes in; it comes out checked, or a RunnerError says what does not suit it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from runner.errors import Fault, RunnerError, nearest
from runner.tasks.names import PLOTS

#: of a count that nobody told: the task was made in code, without the data's facts
UNKNOWN = -1


def one_of(value: Any, choices: Collection[str], *, key: str) -> str:
    """The value, if it is one of the choices. Raises: RunnerError with the nearest."""
    if value not in choices:
        write = " or ".join(f"{key}={hit}" for hit in nearest(str(value), choices) or choices)
        raise RunnerError(Fault(f"{key}={value}", f"it is one of {', '.join(choices)}", write))
    return str(value)


def fraction(value: Any, *, key: str) -> float:
    """0 or more and less than 1. Raises: RunnerError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise RunnerError(Fault(f"{key}={value}", "it is 0 or more and less than 1", f"{key}=0.1"))
    return float(value)


def plots_of(asked: Any, *, kind: str) -> tuple[str, ...]:
    """The pictures to draw at the end of a run. asked: true (all that suit the kind of task), false, or their names.

    Raises: RunnerError for a name that this kind of task has no picture of.
    """
    can = PLOTS.get(kind, ())
    if isinstance(asked, bool) or asked is None:
        return can if asked else ()
    names = [asked] if isinstance(asked, str) else list(asked) if isinstance(asked, Iterable) else [asked]
    if bad := [name for name in names if name not in can]:
        so = f"there is no such picture of this kind of task, {kind}; there are {', '.join(can) or 'none'}"
        write = " or ".join([*(f"task.plots=[{hit}]" for hit in nearest(str(bad[0]), can)), "task.plots=true"])
        raise RunnerError(Fault(f"task.plots={bad[0]}", so, write))
    return tuple(names)


def trains_nothing(task: Any) -> None:
    """Refuses a task with weights of its own: the optimizer, the averaging and the checkpoints know the model's alone.

    Frozen ones are welcome, e.g. a network that a loss compares with. Raises: RunnerError.
    """
    if not isinstance(task, nn.Module):
        return
    if learned := [name for name, parameter in task.named_parameters() if parameter.requires_grad]:
        so = f"it has parameters to learn ({', '.join(learned[:3])}), and only the model's are trained and kept"
        write = "them as parameters of your model, which the task gets (model.log_scale), or requires_grad=False"
        raise RunnerError(Fault(f"task={type(task).__name__}", so, write))
