"""Tasks that compare outputs with numbers, the targets or the inputs themselves: the loss and the mean absolute error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Positive, one_of
from runner.device.precision import at_least_float32
from runner.errors import RunnerError
from runner.tasks.checks import UNKNOWN, described, output_of
from runner.tasks.task import BuiltinTask

Loss = Annotated[str, one_of(("mse", "mae", "huber"))]


class _NumberTask(BuiltinTask):
    """Compares outputs with numbers: reports the loss, the mean absolute error, and the squared one if it is not the loss."""

    converts_data = True
    spreads: Tensor | None

    def __init__(self, *, loss: str, huber_delta: Any = 1.0, **settings: Any) -> None:
        super().__init__(self.kind, loss=loss, **settings)
        self.loss, self.huber_delta = loss, float(huber_delta)
        self.register_buffer("spreads", None, persistent=False)

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        """Return the root of a whole split's mean squared error."""
        return {"rmse": math.sqrt(values.get("mse", values["loss"]))}

    def distances(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the loss, and the mean absolute and squared error. Gradients follow learn_scaled()."""
        if targets.shape != outputs.shape:  # a Dataset's scalars come as (B,), and would broadcast against (B, 1)
            targets = targets.reshape(outputs.shape)
        errors = outputs.detach() - targets
        if self.spreads is None or not torch.is_grad_enabled():
            value = self._loss(outputs, targets)
        else:
            learned = self._scaled_loss(outputs, targets, self.spreads)
            value = self._loss(outputs.detach(), targets) + (learned - learned.detach())  # 0 is added
        values = {"loss": value, "mae": errors.abs().mean()}
        return values if self.loss == "mse" else {**values, "mse": errors.square().mean()}

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss == "huber":
            return F.huber_loss(outputs, targets, delta=self.huber_delta)
        return F.mse_loss(outputs, targets) if self.loss == "mse" else F.l1_loss(outputs, targets)

    def _scaled_loss(self, outputs: Tensor, targets: Tensor, spreads: Tensor) -> Tensor:
        if self.loss == "huber":
            each = F.huber_loss(outputs, targets, reduction="none", delta=self.huber_delta)
            return (each / spreads / spreads).mean()
        errors = (outputs - targets) / spreads
        return (errors.square() if self.loss == "mse" else errors.abs()).mean()


class Regression(_NumberTask):
    """Predicts one or several numbers for each example, (B, T), and reports the means over all of them.

    loss: mse | mae | huber (quadratic up to huber_delta, then linear). A whole split also has rmse, the root of the mean
    squared error.
    """

    name = kind = "regression"

    def __init__(
        self,
        *,
        loss: Loss = "mse",
        huber_delta: Positive = 1.0,
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
        """Take gradients of the loss of targets that are divided by `spreads`, (T,); its value keeps their unit.

        Otherwise the best learning rate depends on the unit, and only the target with the largest numbers is learned.
        """
        self.spreads = torch.tensor(spreads, dtype=torch.get_default_dtype())

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        targets = batch[1]
        if targets.numel() != outputs.numel():
            shapes, count = (tuple(outputs.shape), tuple(targets.shape)), math.prod(targets.shape[1:])
            problem = f"the model gives {shapes[0]}, and what it is compared with is {shapes[1]}"
            fix = f"use a last layer that gives {count} for each row, e.g., nn.Linear(..., {count})"
            raise RunnerError.of("task on this model", problem, fix)
        return self.distances(outputs, targets)

    def predictions(self, outputs: Tensor, /) -> Tensor:
        values = at_least_float32(outputs)
        return values.flatten(1) if values.dim() > 1 else values[:, None]  # len() would fix an export's rows

    def targets(self, batch: Any, /) -> Tensor:
        targets = super().targets(batch)
        return targets.reshape(len(targets), -1)


class Autoencoding(_NumberTask):
    """The inputs are the targets, images as 0..1; outputs take their shape. A batch is (inputs, anything) or only the inputs.

    loss: mse | mae | huber.
    """

    name = kind = "autoencoding"

    def __init__(
        self,
        *,
        loss: Loss = "mse",
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
        inputs = _inputs(batch)
        if outputs.numel() != inputs.numel():
            problem = f"the model gives {tuple(outputs.shape)}, and its inputs are {tuple(inputs.shape)}"
            raise RunnerError.suggest("task=autoencoding", problem, ["model.out_features='${facts.in_features}'"])
        return self.distances(outputs.reshape(inputs.shape), inputs)

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return at_least_float32(outputs).flatten(1)

    def targets(self, batch: Any, /) -> Tensor:
        return _inputs(batch).flatten(1)


def _inputs(batch: Any) -> Tensor:
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        return inputs / 255  # images
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else described(inputs)
        problem = f"the inputs are {kind}, and an autoencoder gives back one tensor of floats"
        raise RunnerError.of("task=autoencoding", problem, "use data whose inputs are such a tensor, or a custom task")
    return inputs
