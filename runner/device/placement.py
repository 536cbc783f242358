"""Moves nested batches and modules to a device, in types that the device has; maps, counts and cuts nested tensors."""

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
    """`change` applied to every tensor in dicts, lists, tuples, NamedTuples and dataclasses; all else passes.

    Where nothing changed the very same object comes back, so a batch that is in its place costs no copy. Containers
    keep their class; a dataclass is copied without running its `__init__` again.
    """
    return cast(T, _map(tree, change))


def move(tree: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """The tree on `device`, in float32 where the device has no float64; what lies there already is not copied.

    non_blocking: from pinned memory, where a device has streams; the caller keeps them in order.
    Raises: ValueError for a non-blocking copy where it would be wrong.
    """
    if non_blocking and device.type in ONLY_BLOCKING:
        raise ValueError(f"non_blocking copies are not safe towards {device.type}")

    def carry(tensor: Tensor) -> Tensor:
        # narrowed first: MPS refuses to receive float64
        return tensor.to(legal_dtype(tensor.dtype, device)).to(device, non_blocking=non_blocking)

    return map_tensors(tree, carry)


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """Moves parameters and buffers to `device`, with 64-bit floats narrowed if the device has none; returns the same module."""
    if not supports_float64(device):
        module._apply(lambda tensor: tensor.to(legal_dtype(tensor.dtype, device)))  # as Module.to() does
    if device.type == "mps":
        for layer in module.modules():
            if isinstance(layer, nn.LayerNorm) and _needing_gradient not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(_needing_gradient)
    return module.to(device)


def copied(tree: T) -> T:
    """Modules, and what else is in the tree, copied where they lie."""
    found = copy.deepcopy(tree)
    for module in found if isinstance(found, tuple) else (found,):
        for layer in module.modules() if isinstance(module, nn.Module) else ():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # cuDNN wants its weights as one block, which copies of each are not
    return found


def _needing_gradient(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A LayerNorm's inputs, as ones that need a gradient: of others MPS gives its weights wrong ones (pytorch#183825,
    mended in 2026-05). So it is above layers that are frozen, and of data itself."""
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in layer.parameters())
    if torch.compiler.is_compiling() or not trains or not inputs or inputs[0].requires_grad:
        return None
    with suppress(RuntimeError):  # inside torch.func's transforms
        return (inputs[0].detach().requires_grad_(), *inputs[1:])
    return None


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor of a nested batch, in the order in which `map_tensors` meets them."""
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, see)
    return found


def leaves(tree: Any) -> list[Any]:
    """Whatever an operation is given in nested tuples, lists and dicts; None counts. torch's own takes ten times as long, for
    all else that may be nested, and who watches a step asks for each operation."""
    found: list[Any] = []
    _gather(tree, found)
    return found


def tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def in_batches(tree: Any, sizes: int | list[int]) -> Iterator[Any]:
    """The rows of a nested batch in smaller ones of those sizes, views of it."""
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
    """The first dimension of the first tensor; 0 where there is none."""
    found = tensors(tree)
    return len(found[0]) if found and found[0].dim() else 0


def _gather(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, tuple | list):
        for part in tree:
            _gather(part, found)
    elif isinstance(tree, dict):
        for part in tree.values():
            _gather(part, found)
    else:
        found.append(tree)


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict | UserDict):  # UserDict: the batches of transformers
        changed = {key: new for key, old in tree.items() if (new := _map(old, change)) is not old}
        return _with_items(tree, changed) if changed else tree
    if isinstance(tree, list | tuple):
        items = [_map(item, change) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old_values = {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
        changed = {name: new for name, old in old_values.items() if (new := _map(old, change)) is not old}
        return _with_fields(tree, changed) if changed else tree
    return tree


def _with_items(mapping: Any, changed: dict[Any, Any]) -> Any:
    new = copy.copy(mapping)  # keeps the class and what it carries: OrderedDict, defaultdict, a library's batch
    for key, value in changed.items():
        new[key] = value
    return new


def _with_fields(record: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(record)
    for name, value in changed.items():
        object.__setattr__(new, name, value)  # a frozen one refuses setattr
    return new
