"""Keeps the weights of several models of one shape in one tensor for each name, (M, ...): each model's own are views of them.

So a step over all of them changes each, and what uses one model (its checkpoint, its evaluation) needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from runner.tasks.task import Task
from runner.training.parts import Parts

TASK = "task"  # what ModelAndTask calls it


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

    parameters, buffers, tensors: By name, (M, ...). The weights are copied once. `tensors` are of `numbers`.

    Args:
        numbers: Names of floats that differed among more members. Floats of modules and tasks that differ among these members,
            e.g., a dropout rate, are found.

    Raises:
        CannotStackError: For models of different shapes.
    """

    def __init__(self, members: Sequence[Parts], *, numbers: Sequence[str] = ()) -> None:
        self.wholes = [ModelAndTask(parts.model, parts.task) for parts in members]
        self.parameters = _stacked([dict(whole.named_parameters()) for whole in self.wholes])
        self.buffers = _stacked([dict(whole.named_buffers()) for whole in self.wholes])
        self.numbers = _numbers(self.wholes, numbers)
        self.tensors = {name: torch.tensor(each, device=members[0].device) for name, each in self.numbers.items()}
        self._autocast = members[0].precision.autocast
        self.device, self.channels_last = members[0].device, members[0].layout.startswith("channels last")

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        numbers: Mapping[str, Tensor],
        batch: Any,
    ) -> Mapping[str, Tensor]:
        """The task's values of the members with these weights, (M,) each. batch: its tensors are (M, B, ...).

        Raises what the model raises with one more dimension; so do random operations that functions.py doesn't replace.
        """
        whole = self.wholes[0]

        def of_one(
            parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], numbers: Mapping[str, Tensor], own: Any
        ) -> Mapping[str, Tensor]:
            for name, number in numbers.items():
                number.each, number.called = self.numbers[name], name  # type: ignore[attr-defined]  # see functions.py
            with self._autocast(), _with_numbers(whole, numbers):
                values: Mapping[str, Tensor] = functional_call(whole, (dict(parameters), dict(buffers)), (own,))
                return values

        each: Callable[..., Mapping[str, Tensor]] = vmap(of_one, randomness="error")
        return each(parameters, buffers, numbers, batch)


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


def _numbers(wholes: Sequence[ModelAndTask], also: Sequence[str]) -> dict[str, list[float]]:
    """The floats of their modules and tasks that are not the same in all, by the module's name and their own.

    An integer among floats is one of them (0 and 0.1). Numbers that are integers in all members count something, e.g., layers.
    """
    found = {}
    for path in (*dict(wholes[0].named_modules()), TASK):
        own = [_attributes(whole, path) for whole in wholes]
        for name, value in own[0].items():
            each = [_as_number(attributes.get(name)) for attributes in own]
            numbers = [number for number in each if number is not None]
            is_float = any(isinstance(attributes.get(name), float) for attributes in own)
            key = f"{path}.{name}"
            is_other = key in also or any(number != value for number in numbers)
            if is_float and len(numbers) == len(own) and is_other:
                found[key] = numbers
    return found


def _as_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _attributes(whole: ModelAndTask, path: str) -> dict[str, Any]:
    try:
        found = whole.task if path == TASK else whole.get_submodule(path)
    except AttributeError:
        return {}
    return getattr(found, "__dict__", {})


@contextmanager
def _with_numbers(whole: ModelAndTask, numbers: Mapping[str, Tensor]) -> Iterator[None]:
    own = {name: _attributes(whole, name.rpartition(".")[0]) for name in numbers}
    before = {name: own[name][name.rpartition(".")[2]] for name in numbers}
    for name, number in numbers.items():
        own[name][name.rpartition(".")[2]] = number
    try:
        yield
    finally:
        for name, number in before.items():
            own[name][name.rpartition(".")[2]] = number
