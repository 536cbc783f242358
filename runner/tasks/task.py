"""Defines what a task is: from a model and a batch on the device, the loss and what to report, as 0-d tensors.

A task is any callable `task(model, batch) -> {"loss": ..., name: ...}`: its first entry is the loss, all are means over
the batch, and nothing in it reads the device. A custom task works in the same way: name it by `_target_`.

With optimizers that take turns (optimizer.turns) it is called as `task(model, batch, turn=NAME)` for the loss of each, and
without a turn where a split is measured. An attribute `turns` restricts the names. If it has a parameter `shared=None`, it
gets a dict there: empty in the first turn of a step, and the same one in the others, per batch. What several turns need is
computed once: `shared["fake"] = model.generator(noise)` in the critic's turn, with `.detach()` in its loss.

A class attribute `converts_data = True` requests what the runner's tasks need of user-defined data: inputs and targets of one float
per example as (N, 1), numbers of arrays and tables as float32, and classes numbered from 0. Without it, tensors come as they are.

With an attribute `needs_grad = True`, evaluation doesn't disable gradients: for a loss of derivatives (PINN, forces).

A method `check_model(model, *, keeps_inputs, data)` raises a RunnerError for a model that the task can't train. The model
has the layers that the data adds; `keeps_inputs` says whether these leave the inputs as they are; `data` is a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeGuard

from torch import Tensor, nn

from runner.tasks.checks import UNKNOWN, inputs_of, output_of, plots_of
from runner.tasks.metric_names import metrics_of
from runner.tasks.metrics import make_metrics


class Task(Protocol):
    def __call__(self, model: nn.Module, batch: Any, /) -> Mapping[str, Tensor]: ...


class Predicting(Protocol):
    """A task that also interprets a model's outputs: for further metrics, plots and `predict`.

    `task(model, batch)` is `task.judge(task.outputs(model, batch), batch)`.
    """

    #: multiclass | multilabel | regression | language | autoencoding | generation
    kind: str
    #: by name, objects with update(predictions, targets), compute() and reset(): torchmetrics' or custom ones
    metrics: Mapping[str, Any]

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        """Run the forward pass."""

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        """Return the loss first, then what else is reported."""

    def predictions(self, outputs: Tensor, /) -> Tensor:
        """Return probabilities (B, C) of classes, or values (B, T)."""

    def targets(self, batch: Any, /) -> Tensor:
        """Return what predictions are compared with."""

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        """Return what follows from a split's values on the host, e.g., the perplexity of a loss."""


#: its members, by name
_MEMBERS = [*Predicting.__annotations__, *(name for name in vars(Predicting) if not name.startswith("_"))]


def is_predicting(task: object) -> TypeGuard[Predicting]:
    """Return whether a task has all members of Predicting."""
    # isinstance() of a protocol ignores __getattr__ since Python 3.12, by which a module finds `metrics`, a submodule
    return all(hasattr(task, name) for name in _MEMBERS)


class BuiltinTask(nn.Module):
    """Base of the runner's tasks; each adds judge(), predictions() and a `kind`."""

    name: ClassVar[str]  # task=NAME, and the class in lower case
    kind: str

    def __init__(
        self,
        kind: str,
        *,
        loss: str | None = None,
        metrics: Any = None,
        plots: Any = False,
        num_outputs: int = UNKNOWN,
        output: int | str | None = None,
    ) -> None:
        """See make_metrics(), plots_of() and output_of(). Raises: RunnerError."""
        super().__init__()
        self.kind, self.output = kind, output
        reported = metrics_of({"_target_": f"runner.tasks.{self.name.capitalize()}", "loss": loss}) or ()
        self.metrics = make_metrics(metrics, kind=kind, num_outputs=num_outputs, reported=reported)
        self.plots = plots_of(plots, kind=kind)

    def __call__(self, model: nn.Module, batch: Any, /) -> dict[str, Tensor]:
        return self.judge(self.outputs(model, batch), batch)

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        return output_of(model(inputs_of(batch, task=self.name)), self.output, task=self.name)

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        raise NotImplementedError

    def targets(self, batch: Any, /) -> Tensor:
        targets: Tensor = batch[1]
        return targets

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        return {}
