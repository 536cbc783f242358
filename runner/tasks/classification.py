"""Logits and classes go in; cross-entropy and accuracy come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classification:
    """Cross-entropy and accuracy. Targets are class indices, (B,) int64; the model gives logits, (B, C).

    Or shares of the classes, (B, C) float32, as mixtures have them: right is then who tells the strongest.
    """

    kind = "multiclass"

    def __init__(self, label_smoothing: float = 0.0, *, metrics: Mapping[str, Any] | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.metrics = dict(metrics or {})

    def __call__(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        return self.judge(self.outputs(model, batch), batch)

    def outputs(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def judge(self, outputs: Tensor, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        targets = batch[1]
        loss = F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)
        with torch.no_grad():
            strongest = targets.argmax(-1) if targets.is_floating_point() else targets
            accuracy = (outputs.argmax(-1) == strongest).float().mean()
        return {"loss": loss, "accuracy": accuracy}

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return outputs.float().softmax(-1)

    def targets(self, batch: tuple[Any, Tensor], /) -> Tensor:
        return batch[1]

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        return {}
