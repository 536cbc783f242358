"""A linear model: one linear map of the flattened rows of a batch of anything, (B, ...) to (B, out_features)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """Logistic regression, when the task is classification. Starts at zero: every class equally likely."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.output = nn.Linear(in_features, out_features)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, out_features)
        output: Tensor = self.output(flat(inputs, self.output.weight.dtype))
        return output


def flat(inputs: Tensor, dtype: torch.dtype) -> Tensor:  # (B, ...) -> (B, F)
    """Flatten the inputs to numbers; integers become floats of the type."""
    return (inputs if inputs.is_floating_point() or inputs.is_complex() else inputs.to(dtype)).flatten(1)
