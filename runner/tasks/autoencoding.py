"""Task: compares outputs with the inputs that they are to be like; reports the loss and the mean absolute error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import Problem, RunnerError
from runner.tasks.checks import one_of, output_of, plots_of
from runner.tasks.metrics import make_metrics
from runner.tasks.regression import LOSSES, distances, distances_reported, like, root_of


class Autoencoding(nn.Module):
    """The inputs are the targets, images as 0..1. A batch is (inputs, anything) or only the inputs.

    Outputs are put into their shape.

    loss: mse | mae | huber.
    """

    kind = "autoencoding"

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
            fix = "task=language, or data of images, signals or tables"
            raise RunnerError(Problem("task=autoencoding", problem, fix))
        self.loss = one_of(loss, LOSSES, key="task.loss")
        reported = distances_reported(self.loss)
        self.metrics = make_metrics(metrics, kind=self.kind, reported=(*reported, "rmse"))
        self.plots = plots_of(plots, kind=self.kind)
        self.output = output

    def __call__(self, model: nn.Module, batch: Any, /) -> dict[str, Tensor]:
        return self.judge(self.outputs(model, batch), batch)

    def check_model(self, model: nn.Module, *, keeps_inputs: bool, data: str) -> None:
        if not keeps_inputs:
            problem = f"a layer before the model changes the columns of {data}, so a model can't reproduce them"
            raise RunnerError(Problem("task=autoencoding", problem, "numeric rows (data=arrays), or a custom task"))

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        found = model(batch[0] if isinstance(batch, tuple | list) else batch)
        return output_of(found, self.output, task="autoencoding")

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        return distances(_as(outputs, _inputs(batch)), _inputs(batch), loss=self.loss)

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return outputs.float().flatten(1)

    def targets(self, batch: Any, /) -> Tensor:
        return _inputs(batch).flatten(1)

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        return root_of(values)


def _inputs(batch: Any) -> Tensor:
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        return inputs / 255  # images
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        said = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        problem = f"the inputs are {said}, and an autoencoder gives back one tensor of floats"
        fix = "data whose inputs are such a tensor, or a custom task"
        raise RunnerError(Problem("task=autoencoding", problem, fix))
    return inputs


def _as(outputs: Tensor, inputs: Tensor) -> Tensor:
    if outputs.numel() != inputs.numel():
        given, wanted = tuple(outputs.shape), tuple(inputs.shape)
        problem = f"the model gives {given}, and its inputs are {wanted}"
        raise RunnerError(Problem("task=autoencoding", problem, "model.out_features='${facts.in_features}'"))
    return like(outputs, inputs)
