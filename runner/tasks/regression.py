"""Outputs and numbers to come near to go in; the mean squared and the mean absolute error come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Regression:
    """Mean squared error, and the mean absolute error beside it. Targets are (B, T) float32, as the model's outputs."""

    kind = "regression"

    def __init__(self, *, metrics: Mapping[str, Any] | None = None) -> None:
        self.metrics = dict(metrics or {})

    def __call__(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        return self.judge(self.outputs(model, batch), batch)

    def outputs(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs

    def judge(self, outputs: Tensor, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        targets = batch[1]
        if targets.dim() != outputs.dim():  # a Dataset's scalars come as (B,); against (B, 1) they would broadcast
            targets = targets.reshape(outputs.shape)
        loss = F.mse_loss(outputs, targets)
        return {"loss": loss, "mae": (outputs.detach() - targets).abs().mean()}

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return outputs.float()

    def targets(self, batch: tuple[Any, Tensor], /) -> Tensor:
        return batch[1]

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        return {}
