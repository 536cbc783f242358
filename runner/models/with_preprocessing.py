"""Joins a model and what its data needs around it in one module, so that all of it travels with the weights."""

from __future__ import annotations

from typing import Any

from torch import nn


class Prepared(nn.Module):
    """outputs = after(model(before(inputs))): columns are normalised before the model, answers scaled back behind it."""

    def __init__(self, model: nn.Module, *, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.model = model
        self.after = after or nn.Identity()

    def forward(self, inputs: Any) -> Any:
        return self.after(self.model(self.before(inputs)))
