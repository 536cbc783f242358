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
    """Copy a module, or a tuple of modules and other objects, on their devices."""
    copies = copy.deepcopy(tree)
    for module in copies if isinstance(copies, tuple) else (copies,):
        for layer in module.modules() if isinstance(module, nn.Module) else ():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # cuDNN needs the weights in one block
    return copies


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
    listed: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        listed.append(tensor)
        return tensor

    map_tensors(tree, add)
    return listed


def leaves(tree: Any, listed: list[Any] | None = None) -> list[Any]:
    """List an operation's arguments in nested tuples, lists and dicts. Ten times as fast as torch's pytree, which has more kinds."""
    listed = [] if listed is None else listed
    if not isinstance(tree, tuple | list | dict):
        listed.append(tree)
        return listed
    for part in tree.values() if isinstance(tree, dict) else tree:
        leaves(part, listed)
    return listed


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
    first = next(iter(tensors(tree)), None)
    return len(first) if first is not None and first.dim() else 0


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, list | tuple):
        items = [_map(item, change) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    is_dict = isinstance(tree, dict | UserDict)  # UserDict: the batches of transformers
    if not is_dict and (isinstance(tree, type) or not dataclasses.is_dataclass(tree)):
        return tree
    parts = tree if is_dict else {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    changed = {key: new for key, old in parts.items() if (new := _map(old, change)) is not old}
    copied = copy.copy(tree) if changed else tree  # keeps the class: OrderedDict, defaultdict, a library's batch
    for key, value in changed.items():
        if is_dict:
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # a frozen dataclass refuses setattr
    return copied
