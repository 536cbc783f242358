"""Scale a model's outputs, (B, T), from a standard deviation of about 1 to the units of the targets."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import RunnerError, nearest


class Scaled(nn.Module):
    """Returns outputs * spreads + means, each (T,), of the targets in the training split. Raises: RunnerError for another T.

    output: The index, key or attribute of the scaled output if the model has several, as in `task.output`.
    """

    means: Tensor
    spreads: Tensor

    def __init__(self, means: Sequence[float], spreads: Sequence[float], output: int | str | None = None) -> None:
        super().__init__()
        self.register_buffer("means", torch.tensor(means, dtype=torch.get_default_dtype()))
        self.register_buffer("spreads", torch.tensor(spreads, dtype=torch.get_default_dtype()))
        self.output = output

    def forward(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return self._scaled(outputs)
        parts = _tensors(outputs)
        if not parts:  # the task raises an error
            return outputs
        if self.output not in parts:
            names = list(map(str, parts))
            hits = nearest(str(self.output), names) or names[:3]
            problem = f"the model returns a {type(outputs).__name__} of {', '.join(names)}, and `task.output` must name the predictions"
            asked = f"task.output={'null' if self.output is None else self.output}"
            raise RunnerError.suggest(asked, problem, (f"task.output={hit}" for hit in hits))
        return _with(outputs, self.output, self._scaled(parts[self.output]))

    def _scaled(self, outputs: Tensor) -> Tensor:
        if outputs.dim() > 1 and outputs.shape[-1] != len(self.means):
            problem = f"the model returns {tuple(outputs.shape)}, and the data has {len(self.means)} targets per row"
            raise RunnerError.suggest("model", problem, ["model.out_features='${facts.out_features}'"])
        return outputs * self.spreads + self.means


def _tensors(outputs: Any) -> dict[int | str | None, Tensor]:
    found: dict[Any, Any] = {}
    if isinstance(outputs, Mapping):
        found = dict(outputs)
    elif isinstance(outputs, list | tuple):
        found = {**dict(enumerate(outputs)), **dict(zip(getattr(outputs, "_fields", ()), outputs, strict=False))}
    else:
        found = getattr(outputs, "__dict__", {})
    return {name: part for name, part in found.items() if isinstance(part, Tensor)}


def _with(outputs: Any, name: Any, part: Tensor) -> Any:
    if isinstance(outputs, list | tuple):
        fields = getattr(outputs, "_fields", ())
        place = fields.index(name) if name in fields else name
        parts = [*outputs[:place], part, *outputs[place + 1 :]]
        return type(outputs)(*parts) if fields else type(outputs)(parts)
    changed = copy.copy(outputs)
    if isinstance(outputs, Mapping):
        changed[name] = part
    else:
        setattr(changed, name, part)
    return changed
