"""Join a model and the preprocessing of its data in one module, so that both are saved with the weights."""

from __future__ import annotations

from typing import Any

from torch import nn


class Prepared(nn.Module):
    """Returns after(model(before(inputs))): normalized inputs, and outputs in the units of the targets."""

    def __init__(self, model: nn.Module, *, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.model = model
        self.after = after or nn.Identity()

    def forward(self, inputs: Any) -> Any:
        return self.after(self.model(self.before(inputs)))
