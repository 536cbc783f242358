"""Moves nested batches and modules to a device, in types that the device has; maps, counts and splits nested tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from runner.device.capabilities import ONLY_BLOCKING, legal_dtype, supports_float64

T = TypeVar("T")


def map_tensors(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """Apply `change` to every tensor in dicts, lists, tuples, NamedTuples and dataclasses.

    Returns the same object if nothing changed. Containers keep their class; a dataclass is copied without `__init__`.
    """
    return cast(T, _map(tree, change))


def move(tree: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Copy the tensors that are not on `device` to it, as float32 if it has no float64.

    Args:
        non_blocking: From pinned memory, to a device with streams; the caller orders the streams.

    Raises:
        ValueError: A non-blocking copy to this device would be wrong.
    """
    if non_blocking and device.type in ONLY_BLOCKING:
        raise ValueError(f"non_blocking copies are not safe towards {device.type}")

    def carry(tensor: Tensor) -> Tensor:
        # narrowed first: MPS refuses to receive float64
        return tensor.to(legal_dtype(tensor.dtype, device)).to(device, non_blocking=non_blocking)

    return map_tensors(tree, carry)


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """Move parameters and buffers to `device`, narrowed if it has no 64-bit floats; return the same module."""
    if not supports_float64(device):
        module._apply(lambda tensor: tensor.to(legal_dtype(tensor.dtype, device)))  # as Module.to() does
    if device.type == "mps":
        for layer in module.modules():
            if isinstance(layer, nn.LayerNorm) and _needing_gradient not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_needing_gradient)
    return module.to(device)


def copied(tree: T) -> T:
    """Copy modules, and what else is in the tree, on their devices."""
    found = copy.deepcopy(tree)
    for module in found if isinstance(found, tuple) else (found,):
        for layer in module.modules() if isinstance(module, nn.Module) else ():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # cuDNN needs the weights in one block
    return found


def _needing_gradient(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Make a LayerNorm's inputs require a gradient. Without one MPS computes wrong gradients of its weights (pytorch#183825)."""
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in layer.parameters())
    if torch.compiler.is_compiling() or not trains or not inputs or inputs[0].requires_grad:
        return None
    with suppress(RuntimeError):  # inside torch.func's transforms
        return (inputs[0].detach().requires_grad_(), *inputs[1:])
    return None


def tensors(tree: Any) -> list[Tensor]:
    """List every tensor of a nested batch, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, see)
    return found


def leaves(tree: Any, found: list[Any] | None = None) -> list[Any]:
    """List an operation's arguments in nested tuples, lists and dicts. Ten times as fast as torch's pytree, which has more kinds."""
    found = [] if found is None else found
    if isinstance(tree, tuple | list):
        for part in tree:
            leaves(part, found)
    elif isinstance(tree, dict):
        for part in tree.values():
            leaves(part, found)
    else:
        found.append(tree)
    return found


def tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def in_batches(tree: Any, sizes: int | list[int]) -> Iterator[Any]:
    """Split a nested batch into smaller ones of these sizes, which are views of it."""
    parts = zip(*(tensor.split(sizes) for tensor in tensors(tree)), strict=True)
    if type(tree) is tuple and all(isinstance(part, Tensor) for part in tree):
        return parts  # (inputs, targets), the most common case: the nesting is zip's own

    def nested(batch: tuple[Tensor, ...]) -> Any:
        leaves = iter(batch)
        return map_tensors(tree, lambda _: next(leaves))

    return map(nested, parts)


def num_bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(tree))


def num_rows(tree: Any) -> int:
    """Return the first dimension of the first tensor; 0 without one."""
    found = tensors(tree)
    return len(found[0]) if found and found[0].dim() else 0


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict | UserDict):  # UserDict: the batches of transformers
        changed = {key: new for key, old in tree.items() if (new := _map(old, change)) is not old}
        if not changed:
            return tree
        new = copy.copy(tree)  # keeps the class: OrderedDict, defaultdict, a library's batch
        for key, value in changed.items():
            new[key] = value
        return new
    if isinstance(tree, list | tuple):
        items = [_map(item, change) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old_values = {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
        changed = {name: new for name, old in old_values.items() if (new := _map(old, change)) is not old}
        if not changed:
            return tree
        new = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(new, name, value)  # a frozen one refuses setattr
        return new
    return tree
