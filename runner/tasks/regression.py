"""Tasks that compare outputs with numbers, the targets or the inputs themselves: the loss and the mean absolute error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import choice
from runner.device.precision import at_least_float32
from runner.errors import RunnerError
from runner.tasks.checks import UNKNOWN, inputs_of, output_of, plots_of
from runner.tasks.metrics import make_metrics

LOSSES = ("mse", "mae", "huber")


class Regression(nn.Module):
    """One or several numbers for each example: reports a loss and the mean absolute error over all of them.

    Targets are (B, T), as the model's outputs. loss: mse | mae | huber (quadratic up to huber_delta, then
    linear). The root of the mean squared error is a value of a whole split, rmse.
    """

    kind = "regression"
    converts_data = True
    spreads: Tensor | None

    def __init__(
        self,
        *,
        loss: str = "mse",
        huber_delta: float = 1.0,
        num_classes: int | None = UNKNOWN,
        num_outputs: int = UNKNOWN,
        is_multilabel: bool = False,
        output: int | str | None = None,
        metrics: Any = None,
        plots: Any = True,
    ) -> None:
        """num_classes, num_outputs, is_multilabel: of the data. Raises: RunnerError for data with classes, and for other losses."""
        super().__init__()
        if num_classes not in (None, UNKNOWN):
            problem = f"the targets of this data are {num_classes} classes, and a regression predicts numbers"
            fix = "use `task=classification`, or `data.kind=regression` if the numbers are quantities"
            raise RunnerError.of("task=regression", problem, fix)
        if is_multilabel:
            problem = "the targets of this data are labels, each 0 or 1, and a regression predicts numbers"
            raise RunnerError.suggest("task=regression", problem, ["task=classification", "data.kind=regression"])
        self.loss, self.huber_delta = choice(loss, LOSSES, key="task.loss"), _delta(huber_delta)
        reported = distances_reported(self.loss)
        self.metrics = make_metrics(metrics, kind=self.kind, num_outputs=num_outputs, reported=(*reported, "rmse"))
        self.plots = plots_of(plots, kind=self.kind)
        self.output = output
        self.register_buffer("spreads", None, persistent=False)

    def learn_scaled(self, spreads: Sequence[float]) -> None:
        """From now on gradients are those of the loss of targets that are divided by these, (T,); its value stays in theirs.

        Else the best learning rate depends on the unit, and only the target with the largest numbers is learned.
        """
        self.spreads = torch.tensor(spreads, dtype=torch.get_default_dtype())

    def __call__(self, model: nn.Module, batch: Any, /) -> dict[str, Tensor]:
        return self.judge(self.outputs(model, batch), batch)

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        return output_of(model(inputs_of(batch, task="regression")), self.output, task="regression")

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        targets = like(batch[1], outputs)
        return distances(outputs, targets, loss=self.loss, huber_delta=self.huber_delta, spreads=self.spreads)

    def predictions(self, outputs: Tensor, /) -> Tensor:
        values = at_least_float32(outputs)
        return values.flatten(1) if values.dim() > 1 else values[:, None]  # len() would fix an export's rows

    def targets(self, batch: Any, /) -> Tensor:
        targets: Tensor = batch[1]
        return targets.reshape(len(targets), -1)

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        return root_of(values)


class Autoencoding(nn.Module):
    """The inputs are the targets, images as 0..1. A batch is (inputs, anything) or only the inputs.

    Outputs are put into their shape.

    loss: mse | mae | huber.
    """

    kind = "autoencoding"
    converts_data = True

    def __init__(
        self,
        *,
        loss: str = "mse",
        vocab_size: int | None = None,
        output: int | str | None = None,
        metrics: Any = None,
        plots: Any = True,
    ) -> None:
        """vocab_size: of the data, None for all but texts. Raises: RunnerError for texts."""
        super().__init__()
        if vocab_size is not None:
            problem = "this data is texts, and distances between tokens mean nothing"
            fix = "use `task=language`, or data of images, signals or tables"
            raise RunnerError.of("task=autoencoding", problem, fix)
        self.loss = choice(loss, LOSSES, key="task.loss")
        reported = distances_reported(self.loss)
        self.metrics = make_metrics(metrics, kind=self.kind, reported=(*reported, "rmse"))
        self.plots = plots_of(plots, kind=self.kind)
        self.output = output

    def __call__(self, model: nn.Module, batch: Any, /) -> dict[str, Tensor]:
        return self.judge(self.outputs(model, batch), batch)

    def check_model(self, model: nn.Module, *, keeps_inputs: bool, data: str) -> None:
        if not keeps_inputs:
            problem = f"a layer before the model changes the columns of {data}, so a model can't reproduce them"
            raise RunnerError.of("task=autoencoding", problem, "use numeric rows (`data=arrays`), or a custom task")

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        found = model(batch[0] if isinstance(batch, tuple | list) else batch)
        return output_of(found, self.output, task="autoencoding")

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        return distances(_as(outputs, _inputs(batch)), _inputs(batch), loss=self.loss)

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return at_least_float32(outputs).flatten(1)

    def targets(self, batch: Any, /) -> Tensor:
        return _inputs(batch).flatten(1)

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        return root_of(values)


def distances(
    outputs: Tensor, targets: Tensor, *, loss: str, huber_delta: float = 1.0, spreads: Tensor | None = None
) -> dict[str, Tensor]:
    """The loss, the mean absolute error, and the mean squared one where that is not the loss. spreads: see learn_scaled()."""
    apart = outputs.detach() - targets
    if spreads is None or not torch.is_grad_enabled():
        value = _loss(outputs, targets, loss, huber_delta)
    else:
        learned = _scaled_loss(outputs, targets, loss, huber_delta, spreads)
        value = _loss(outputs.detach(), targets, loss, huber_delta) + (learned - learned.detach())  # 0 is added
    values = {"loss": value, "mae": apart.abs().mean()}
    return values if loss == "mse" else {**values, "mse": apart.square().mean()}


def _loss(outputs: Tensor, targets: Tensor, loss: str, huber_delta: float) -> Tensor:
    if loss == "mse":
        return F.mse_loss(outputs, targets)
    return F.l1_loss(outputs, targets) if loss == "mae" else F.huber_loss(outputs, targets, delta=huber_delta)


def _scaled_loss(outputs: Tensor, targets: Tensor, loss: str, huber_delta: float, spreads: Tensor) -> Tensor:
    if loss == "huber":
        return (F.huber_loss(outputs, targets, reduction="none", delta=huber_delta) / spreads / spreads).mean()
    apart = (outputs - targets) / spreads
    return (apart.square() if loss == "mse" else apart.abs()).mean()


def distances_reported(loss: str) -> tuple[str, ...]:
    """The names of distances()."""
    return ("loss", "mae") if loss == "mse" else ("loss", "mae", "mse")


def root_of(values: Mapping[str, float]) -> dict[str, float]:
    """The root of a whole split's mean squared error."""
    return {"rmse": math.sqrt(values.get("mse", values["loss"]))}


def like(targets: Tensor, outputs: Tensor) -> Tensor:
    """The targets in the shape of the outputs: a Dataset's scalars come as (B,), and against (B, 1) they would broadcast.

    Raises: RunnerError where they are not as many.
    """
    if targets.shape == outputs.shape:
        return targets
    if targets.numel() != outputs.numel():
        given, wanted = tuple(outputs.shape), tuple(targets.shape)
        problem = f"the model gives {given}, and what it is compared with is {wanted}"
        fix = f"use a last layer that gives {(count := math.prod(wanted[1:]))} for each row, e.g., nn.Linear(..., {count})"
        raise RunnerError.of("task on this model", problem, fix)
    return targets.reshape(outputs.shape)


def _delta(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise RunnerError.suggest(
            f"task.huber_delta={value}", "`task.huber_delta` must be more than 0", ["task.huber_delta=1.0"]
        )
    return float(value)


def _inputs(batch: Any) -> Tensor:
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        return inputs / 255  # images
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        said = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        problem = f"the inputs are {said}, and an autoencoder gives back one tensor of floats"
        fix = "use data whose inputs are such a tensor, or a custom task"
        raise RunnerError.of("task=autoencoding", problem, fix)
    return inputs


def _as(outputs: Tensor, inputs: Tensor) -> Tensor:
    if outputs.numel() != inputs.numel():
        given, wanted = tuple(outputs.shape), tuple(inputs.shape)
        problem = f"the model gives {given}, and its inputs are {wanted}"
        raise RunnerError.suggest("task=autoencoding", problem, ["model.out_features='${facts.in_features}'"])
    return like(outputs, inputs)
