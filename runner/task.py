"""A model and a batch on the device go in; the loss to learn from and what to report come out, as 0-d tensors.

A task is any callable `task(model, batch) -> {"loss": ..., name: ...}`: its first entry is the loss, all are means over
the batch, and nothing in it reads the device. Yours stands on the same footing: name it by `_target_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Task(Protocol):
    def __call__(self, model: nn.Module, batch: Any, /) -> Mapping[str, Tensor]: ...


class Classification:
    """Cross-entropy and accuracy. Targets are class indices, (B,) int64; the model gives logits, (B, C)."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = model(inputs)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        with torch.no_grad():
            accuracy = (logits.argmax(-1) == targets).float().mean()
        return {"loss": loss, "accuracy": accuracy}


class Regression:
    """Mean squared error, and the mean absolute error beside it. Targets are (B, T) float32, as the model's outputs."""

    def __call__(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = model(inputs)
        if targets.dim() != outputs.dim():  # a Dataset's scalars come as (B,); against (B, 1) they would broadcast
            targets = targets.reshape(outputs.shape)
        loss = F.mse_loss(outputs, targets)
        return {"loss": loss, "mae": (outputs.detach() - targets).abs().mean()}
