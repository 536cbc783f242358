"""Keeps the weights of several models of one shape in one tensor for each name, (M, ...): each model's own are views of them.

So a step over all of them changes each, and what uses one model (its checkpoint, its evaluation) needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from runner.tasks.task import Task
from runner.training.parts import Parts


class CannotStackError(Exception):
    """Why jobs can't be trained together, as a text for one line."""


class ModelAndTask(nn.Module):
    """A model and its task as one module, so that the buffers of both have names."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Mapping[str, Tensor]:
        return self.task(self.model, batch)


class ModelStack:
    """The stacked weights and buffers of some members, and their forward pass.

    parameters, buffers: By name, (M, ...). The weights are copied once.

    Raises:
        CannotStackError: For models of different shapes.
    """

    def __init__(self, members: Sequence[Parts]) -> None:
        self.wholes = [ModelAndTask(parts.model, parts.task) for parts in members]
        self.parameters = _stacked([dict(whole.named_parameters()) for whole in self.wholes])
        self.buffers = _stacked([dict(whole.named_buffers()) for whole in self.wholes])
        self._autocast = members[0].precision.autocast
        self.device, self.channels_last = members[0].device, members[0].layout.startswith("channels last")

    def forward(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> Mapping[str, Tensor]:
        """The task's values of the members with these weights, (M,) each. batch: Its tensors are (M, B, ...).

        Raises what the model raises with one more dimension; so do random operations that functions.py doesn't replace.
        """

        def forward_one(
            parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], own: Any
        ) -> Mapping[str, Tensor]:
            with self._autocast():
                weights = {**parameters, **buffers}
                values: Mapping[str, Tensor] = functional_call(self.wholes[0], weights, (own,))
                return values

        each: Callable[..., Mapping[str, Tensor]] = vmap(forward_one, randomness="error")
        return each(parameters, buffers, batch)


def _stacked(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    found = {}
    for name in dict.fromkeys(name for named in each for name in named):
        tensors = [named[name] for named in each if name in named]
        first = tensors[0]
        if len(tensors) < len(each) or any((own.shape, own.dtype) != (first.shape, first.dtype) for own in tensors):
            raise CannotStackError(f"their weights differ in shape ({name.removeprefix('model.')})")
        together = _as_laid_out([tensor.detach() for tensor in tensors])
        for own, tensor in zip(together, tensors, strict=True):
            tensor.data = own
        found[name] = together.requires_grad_(first.requires_grad)
    return found


def _as_laid_out(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    if extent != first.numel():  # with gaps, or one number for several
        return torch.stack(list(tensors))
    memory = first.new_empty(len(tensors) * extent)
    together = memory.as_strided((len(tensors), *first.shape), (extent, *first.stride()))
    for own, tensor in zip(together, tensors, strict=True):
        own.copy_(tensor)
    return together
