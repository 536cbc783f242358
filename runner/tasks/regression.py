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
from runner.tasks.checks import UNKNOWN, output_of
from runner.tasks.task import BuiltinTask

LOSSES = ("mse", "mae", "huber")


class _NumberTask(BuiltinTask):
    """Compares outputs with numbers: reports the loss, the mean absolute error, and the squared one where it is not the loss."""

    converts_data = True
    spreads: Tensor | None

    def __init__(self, *, loss: str, huber_delta: float = 1.0, **settings: Any) -> None:
        loss, huber_delta = choice(loss, LOSSES, key="task.loss"), _delta(huber_delta)
        reported = ("loss", "mae", "rmse") if loss == "mse" else ("loss", "mae", "mse", "rmse")
        super().__init__(self.kind, reported=reported, **settings)
        self.loss, self.huber_delta = loss, huber_delta
        self.register_buffer("spreads", None, persistent=False)

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        """The root of a whole split's mean squared error."""
        return {"rmse": math.sqrt(values.get("mse", values["loss"]))}

    def distances(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss, and the mean absolute and squared error. Gradients are those of the scaled loss: see learn_scaled()."""
        apart = outputs.detach() - targets
        if self.spreads is None or not torch.is_grad_enabled():
            value = self._loss(outputs, targets)
        else:
            learned = self._scaled_loss(outputs, targets, self.spreads)
            value = self._loss(outputs.detach(), targets) + (learned - learned.detach())  # 0 is added
        values = {"loss": value, "mae": apart.abs().mean()}
        return values if self.loss == "mse" else {**values, "mse": apart.square().mean()}

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss == "huber":
            return F.huber_loss(outputs, targets, delta=self.huber_delta)
        return F.mse_loss(outputs, targets) if self.loss == "mse" else F.l1_loss(outputs, targets)

    def _scaled_loss(self, outputs: Tensor, targets: Tensor, spreads: Tensor) -> Tensor:
        if self.loss == "huber":
            each = F.huber_loss(outputs, targets, reduction="none", delta=self.huber_delta)
            return (each / spreads / spreads).mean()
        apart = (outputs - targets) / spreads
        return (apart.square() if self.loss == "mse" else apart.abs()).mean()


class Regression(_NumberTask):
    """One or several numbers for each example: reports a loss and the mean absolute error over all of them.

    Targets are (B, T), as the model's outputs. loss: mse | mae | huber (quadratic up to huber_delta, then
    linear). The root of the mean squared error is a value of a whole split, rmse.
    """

    name = kind = "regression"

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
        if num_classes not in (None, UNKNOWN):
            problem = f"the targets of this data are {num_classes} classes, and a regression predicts numbers"
            fix = "use `task=classification`, or `data.kind=regression` if the numbers are quantities"
            raise RunnerError.of("task=regression", problem, fix)
        if is_multilabel:
            problem = "the targets of this data are labels, each 0 or 1, and a regression predicts numbers"
            raise RunnerError.suggest("task=regression", problem, ["task=classification", "data.kind=regression"])
        settings = {"metrics": metrics, "plots": plots, "num_outputs": num_outputs, "output": output}
        super().__init__(loss=loss, huber_delta=huber_delta, **settings)

    def learn_scaled(self, spreads: Sequence[float]) -> None:
        """From now on gradients are those of the loss of targets that are divided by these, (T,); its value stays in theirs.

        Else the best learning rate depends on the unit, and only the target with the largest numbers is learned.
        """
        self.spreads = torch.tensor(spreads, dtype=torch.get_default_dtype())

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        return self.distances(outputs, like(batch[1], outputs))

    def predictions(self, outputs: Tensor, /) -> Tensor:
        values = at_least_float32(outputs)
        return values.flatten(1) if values.dim() > 1 else values[:, None]  # len() would fix an export's rows

    def targets(self, batch: Any, /) -> Tensor:
        targets = super().targets(batch)
        return targets.reshape(len(targets), -1)


class Autoencoding(_NumberTask):
    """The inputs are the targets, images as 0..1. A batch is (inputs, anything) or only the inputs.

    Outputs are put into their shape.

    loss: mse | mae | huber.
    """

    name = kind = "autoencoding"

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
        if vocab_size is not None:
            problem = "this data is texts, and distances between tokens mean nothing"
            fix = "use `task=language`, or data of images, signals or tables"
            raise RunnerError.of("task=autoencoding", problem, fix)
        super().__init__(loss=loss, metrics=metrics, plots=plots, output=output)

    def check_model(self, model: nn.Module, *, keeps_inputs: bool, data: str) -> None:
        if not keeps_inputs:
            problem = f"a layer before the model changes the columns of {data}, so a model can't reproduce them"
            raise RunnerError.of("task=autoencoding", problem, "use numeric rows (`data=arrays`), or a custom task")

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        outputs = model(batch[0] if isinstance(batch, tuple | list) else batch)
        return output_of(outputs, self.output, task=self.name)

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        return self.distances(_as(outputs, _inputs(batch)), _inputs(batch))

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return at_least_float32(outputs).flatten(1)

    def targets(self, batch: Any, /) -> Tensor:
        return _inputs(batch).flatten(1)


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
