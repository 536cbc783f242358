"""Keeps the weights of several models of one shape in one tensor for each name, (M, ...): each model's own are views of them.

So a step over all of them changes each, and whatever knows one model alone (its checkpoint, its evaluation) goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from runner.tasks.task import Task
from runner.training.parts import Parts


class CannotStackError(Exception):
    """Why trainings can't take their steps together, in words that go on a line."""


class Whole(nn.Module):
    """A model and its task as one module, so that the buffers of both have names."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Mapping[str, Tensor]:
        return self.task(self.model, batch)


class Stack:
    """The stacked weights and buffers of some members, and their forward pass.

    parameters, buffers: by name, (M, ...); what trains asks for gradients. One copy of the weights is made.
    Raises: CannotStackError for models of different shapes.
    """

    def __init__(self, members: Sequence[Parts]) -> None:
        self.wholes = [Whole(parts.model, parts.task) for parts in members]
        self.parameters = _stacked([dict(whole.named_parameters()) for whole in self.wholes])
        self.buffers = _stacked([dict(whole.named_buffers()) for whole in self.wholes])
        self._autocast = members[0].precision.autocast

    def __len__(self) -> int:
        return len(self.wholes)

    def named_in(self, member: Parts, parameter: Tensor) -> str:
        """The name of a member's parameter in the stack."""
        return next(f"model.{name}" for name, value in member.model.named_parameters() if value is parameter)

    def states(self, at: slice) -> dict[str, Tensor]:
        """What averages follow: the stacked entries of the models' state_dict(), by its names."""
        both = {**self.parameters, **self.buffers}
        names = [name for name in self.wholes[0].model.state_dict() if f"model.{name}" in both]  # tied ones count once
        return {name: both[f"model.{name}"].detach()[at] for name in names}

    def forward(self, weights: Weights, batch: Any) -> Mapping[str, Tensor]:
        """The task's values of some members with these weights, (m,) each. batch: its tensors are (m, B, ...).

        Raises: what the model raises with one more dimension; random operations that nobody made a member's own do.
        """
        whole = self.wholes[0]

        def of_one(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], own: Any) -> Mapping[str, Tensor]:
            with self._autocast():
                values: Mapping[str, Tensor] = functional_call(whole, (dict(parameters), dict(buffers)), (own,))
                return values

        each: Callable[..., Mapping[str, Tensor]] = vmap(of_one, randomness="error")
        return each(weights.parameters, weights.buffers, batch)

    def forward_one(self, number: int, batch: Any) -> Mapping[str, Tensor]:
        """The task's values of one member, by its own model."""
        with self._autocast():
            values: Mapping[str, Tensor] = self.wholes[number](batch)
            return values

    def weights(self, members: slice) -> Weights:
        """Of some members: those of all are the stack's own, others are leaves of their own on the same memory."""
        if members == slice(0, len(self)):
            return Weights(self.parameters, self.buffers)
        parameters = {
            name: value.detach()[members].requires_grad_(value.requires_grad) for name, value in self.parameters.items()
        }
        return Weights(parameters, {name: value[members] for name, value in self.buffers.items()})


@dataclass(frozen=True)
class Weights:
    """Stacked parameters and buffers by name, (m, ...)."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _stacked(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Their tensors by name in one each, which theirs are views of from now on."""
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
    """A stack whose parts have the very strides of the tensors (channels last, say): a kernel is chosen by them."""
    first = tensors[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    if extent != first.numel():  # with gaps, or one number for several
        return torch.stack(list(tensors))
    memory = first.new_empty(len(tensors) * extent)
    together = memory.as_strided((len(tensors), *first.shape), (extent, *first.stride()))
    for own, tensor in zip(together, tensors, strict=True):
        own.copy_(tensor)
    return together
