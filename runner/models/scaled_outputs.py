"""Scales a model's outputs, (B, T), from a spread of about 1 to the units of the targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runner.errors import Fault, RunnerError


class Scaled(nn.Module):
    """outputs * spreads + means, each (T,): what the targets of the training split have. Raises: RunnerError for another T."""

    means: Tensor
    spreads: Tensor

    def __init__(self, means: Sequence[float], spreads: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("means", torch.tensor(means, dtype=torch.float32))
        self.register_buffer("spreads", torch.tensor(spreads, dtype=torch.float32))

    def forward(self, outputs: Tensor) -> Tensor:
        if outputs.dim() > 1 and outputs.shape[-1] != len(self.means):
            problem = f"the model gives {tuple(outputs.shape)}, and the data has {len(self.means)} targets a row"
            raise RunnerError(Fault("model", problem, "model.out_features='${facts.out_features}'"))
        return outputs * self.spreads + self.means
