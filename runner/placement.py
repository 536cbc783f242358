"""Nested batches and modules go in; the same come out on a device, in types that the device has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

#: kinds of device without 64-bit floats, and what takes their place (pytorch#122602)
NO_FLOAT64 = ("mps",)
NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def map_tensors(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """`change` applied to every tensor in dicts, lists, tuples, NamedTuples and dataclasses; all else passes.

    Where nothing changed, the very same object comes back, so that a batch in its place costs no copy.
    """
    return _map(tree, change)  # type: ignore[no-any-return]


def move(tree: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """The tree on `device`, in float32 where the device has no float64; what lies there already is not copied.

    non_blocking: only for CUDA and pinned memory; towards MPS it is refused, since it can read freed memory there
    (pytorch#83015, #189690).
    """
    if non_blocking and device.type != "cuda":
        raise ValueError(f"non_blocking copies are safe towards CUDA only, not {device.type}")
    return map_tensors(
        tree, lambda tensor: tensor.to(device, legal_dtype(tensor.dtype, device), non_blocking=non_blocking)
    )


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on `device`, its 64-bit floats narrowed where the device has none."""
    if device.type in NO_FLOAT64:
        module._apply(lambda tensor: tensor.to(legal_dtype(tensor.dtype, device)))
    return module.to(device)


def legal_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`dtype`, or what takes its place on a device that does not have it."""
    return NARROWER.get(dtype, dtype) if device.type in NO_FLOAT64 else dtype


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a nested batch."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))


def num_bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(tree))


def num_rows(tree: Any) -> int:
    """The first dimension of the first tensor; 0 when there is none."""
    first = next(tensors(tree), None)
    return 0 if first is None or first.dim() == 0 else len(first)


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        values = {key: _map(value, change) for key, value in tree.items()}
        if all(values[key] is value for key, value in tree.items()):
            return tree
        return values if type(tree) is dict else _same_mapping(tree, values)
    if isinstance(tree, list | tuple):
        items = [_map(item, change) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
        new = {name: _map(value, change) for name, value in old.items()}
        return tree if all(new[name] is old[name] for name in old) else dataclasses.replace(tree, **new)
    return tree


def _same_mapping(tree: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same class (OrderedDict, defaultdict, a batch class of some library) with other values."""
    import copy

    new = copy.copy(tree)
    for key, value in values.items():
        new[key] = value
    return new
