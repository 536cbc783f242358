"""Names any tensor of a model, a batch, an optimizer or a task by its memory, and keeps the named tensors alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

T = TypeVar("T")

#: limits for a plain container: its items, and how deep they are nested
MAX_ITEMS, MAX_DEPTH = 64, 4
#: how an error describes a kind of name
KINDS = {
    "parameter": "parameter",
    "buffer": "buffer",
    "attribute": "a plain attribute, no buffer",
    "list": "of a module in a plain list, dict or attribute",
    "batch": "batch field",
    "optimizer": "optimizer state",
    "local": "a variable",
    "closure": "a variable of the function around it",
    "global": "a global variable",
}


@dataclass(frozen=True)
class Name:
    """The path of a tensor, e.g., model.head.scale, and its kind."""

    path: str
    kind: str  # of KINDS
    owner: str = ""  # the class of the module that has it

    def __str__(self) -> str:
        return f"{self.path} ({KINDS[self.kind]})"


def storage_of(tensor: Tensor) -> int:
    """Return a number that views of the same memory have in common, for as long as one of them lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class TensorNames:
    """Names tensors, and keeps them alive, so that no other tensor can have their memory."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Tensor, Name]] = {}  # by storage
        self._modules: list[tuple[nn.Module, str]] = []

    def get(self, tensor: Tensor) -> Name | None:
        named = self._names.get(storage_of(tensor))
        return named and named[1]

    def all(self) -> list[tuple[Tensor, Name]]:
        """Return every tensor and its name, in the order in which they were added."""
        return list(self._names.values())

    def forget(self) -> None:
        """Remove all names and release the tensors."""
        self._names.clear()
        self._modules.clear()

    def update(self) -> None:
        """Name the modules' tensors again: a forward pass may have replaced attributes."""
        for module, path in list(self._modules):
            self.model(module, path)

    def model(self, module: nn.Module, path: str = "model") -> None:
        if (module, path) not in self._modules:
            self._modules.append((module, path))
        for tensor, name in _tensors_of(module, path, set(), kind=""):
            self._add(tensor, name)

    def batch(self, batch: Any, path: str = "batch") -> None:
        for tensor_path, tensor in _inside(batch, path, Tensor):
            self._add(tensor, Name(tensor_path, "batch"))

    def object(self, value: Any, path: str) -> None:
        """Name the tensors of a module, or those among the attributes of another object, such as a task."""
        if isinstance(value, nn.Module):
            self.model(value, path)
            return
        for attribute, inner in _attributes(value).items():
            for tensor_path, tensor in _inside(inner, f"{path}.{attribute}", Tensor):
                self._add(tensor, Name(tensor_path, "attribute", type(value).__name__))

    def optimizer(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            name = self.get(parameter)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._add(value, Name(f"optimizer.state[{name.path if name else '?'}][{key!r}]", "optimizer"))

    def _add(self, tensor: Tensor, name: Name) -> None:
        self._names.setdefault(storage_of(tensor), (tensor, name))


def in_frame(frame: FrameType | None, tensor: Tensor) -> Name | None:
    """Return the variable of a running function that holds the tensor."""
    if frame is None:
        return None
    code, storage = frame.f_code, storage_of(tensor)
    variables = [(name, "closure" if name in code.co_freevars else "local", frame.f_locals) for name in frame.f_locals]
    for name, kind, values in [*variables, *((name, "global", frame.f_globals) for name in code.co_names)]:
        for path, value in _inside(values.get(name), name, Tensor):
            if storage_of(value) == storage:
                return Name(path, kind)
    return None


def _tensors_of(module: nn.Module, path: str, seen: set[int], *, kind: str) -> Iterator[tuple[Tensor, Name]]:
    """Yield the tensors of a module and its children, also those that torch does not know. kind: of all of them."""
    if id(module) in seen:
        return
    seen.add(id(module))
    owner = type(module).__name__
    for registered, own_kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
        for name, tensor in registered.items():
            if tensor is not None:
                yield tensor, Name(f"{path}.{name}", kind or own_kind, owner)
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors_of(child, f"{path}.{name}", seen, kind=kind)
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        for tensor_path, tensor in _inside(value, f"{path}.{name}", Tensor):
            yield tensor, Name(tensor_path, "attribute", owner)
        for hidden_path, hidden in _inside(value, f"{path}.{name}", nn.Module):
            yield from _tensors_of(hidden, hidden_path, seen, kind="list")


def _inside(value: Any, path: str, kind: type[T], depth: int = 0) -> Iterator[tuple[str, T]]:
    if isinstance(value, kind):
        yield path, value
    elif depth < MAX_DEPTH and not isinstance(value, Tensor | nn.Module | type):
        for step, inner in _parts(value):
            yield from _inside(inner, path + step, kind, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in list(value.items())[:MAX_ITEMS]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", inner) for name, inner in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value[:MAX_ITEMS])]
    if dataclasses.is_dataclass(value) or type(value).__module__ not in ("builtins", "functools"):
        return [(f".{name}", inner) for name, inner in _attributes(value).items()]
    return []


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class; libraries' objects are skipped."""
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", "runner") and not dataclasses.is_dataclass(value):
        return {}
    return dict(getattr(value, "__dict__", {}))
