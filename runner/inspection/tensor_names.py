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

MOST_ITEMS = 64  # of a plain container that are looked at
MOST_DEPTH = 4
TORCHS_OWN = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Name:
    """model.head.scale, and what it is there."""

    path: str
    kind: str  # parameter, buffer, attribute, list, batch, optimizer, local, closure, global
    owner: str = ""  # the class of the module that holds it

    def __str__(self) -> str:
        return f"{self.path} ({KINDS[self.kind]})"


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


def storage_of(tensor: Tensor) -> int:
    """What views of the same memory have in common, for as long as one of them lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class TensorNames:
    """Keeps what it names alive, so that no other tensor can take its place in memory."""

    def __init__(self) -> None:
        self._names: dict[int, Name] = {}
        self._kept: list[Tensor] = []
        self._modules: list[tuple[nn.Module, str]] = []

    def get(self, tensor: Tensor) -> Name | None:
        return self._names.get(storage_of(tensor))

    def all(self) -> list[tuple[Tensor, Name]]:
        """Every tensor that has a name, in the order in which they were given."""
        return [(tensor, self._names[storage_of(tensor)]) for tensor in self._kept]

    def forget(self) -> None:
        """Lets go of everything."""
        self._names.clear()
        self._kept.clear()
        self._modules.clear()

    def look_again(self) -> None:
        """Update the names: a forward pass may have replaced attributes of modules."""
        for module, path in list(self._modules):
            self.model(module, path)

    def model(self, module: nn.Module, path: str = "model") -> None:
        if (module, path) not in self._modules:
            self._modules.append((module, path))
        for tensor, name in _tensors_of(module, path, set(), kind=""):
            self._add(tensor, name)

    def batch(self, batch: Any, path: str = "batch") -> None:
        for found, tensor in _inside(batch, path, Tensor):
            self._add(tensor, Name(found, "batch"))

    def object(self, value: Any, path: str) -> None:
        """Return the tensors among the attributes of an object that is not a module, such as a task."""
        if isinstance(value, nn.Module):
            self.model(value, path)
            return
        for attribute, inner in _attributes(value).items():
            for found, tensor in _inside(inner, f"{path}.{attribute}", Tensor):
                self._add(tensor, Name(found, "attribute", type(value).__name__))

    def optimizer(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            known = self.get(parameter)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._add(value, Name(f"optimizer.state[{known.path if known else '?'}][{key!r}]", "optimizer"))

    def _add(self, tensor: Tensor, name: Name) -> None:
        if self._names.setdefault(storage_of(tensor), name) is name:
            self._kept.append(tensor)


def in_frame(frame: FrameType | None, tensor: Tensor) -> Name | None:
    """The variable of a running function that holds the tensor."""
    if frame is None:
        return None
    wanted, code = storage_of(tensor), frame.f_code
    for name, value in frame.f_locals.items():
        for path, found in _inside(value, name, Tensor):
            if storage_of(found) == wanted:
                return Name(path, "closure" if name in code.co_freevars else "local")
    for name in code.co_names:
        for path, found in _inside(frame.f_globals.get(name), name, Tensor):
            if storage_of(found) == wanted:
                return Name(path, "global")
    return None


def _tensors_of(module: nn.Module, path: str, seen: set[int], *, kind: str) -> Iterator[tuple[Tensor, Name]]:
    """A module's tensors and its children's, those too that torch does not know of. kind: what all of them are."""
    if id(module) in seen:
        return
    seen.add(id(module))
    owner = type(module).__name__
    for registered, what in ((module._parameters, "parameter"), (module._buffers, "buffer")):
        for name, tensor in registered.items():
            if tensor is not None:
                yield tensor, Name(f"{path}.{name}", kind or what, owner)
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors_of(child, f"{path}.{name}", seen, kind=kind)
    for name, value in vars(module).items():
        if name in TORCHS_OWN:
            continue
        for found, tensor in _inside(value, f"{path}.{name}", Tensor):
            yield tensor, Name(found, "attribute", owner)
        for found, hidden in _inside(value, f"{path}.{name}", nn.Module):
            yield from _tensors_of(hidden, found, seen, kind="list")


def _inside(value: Any, path: str, kind: type[T], depth: int = 0) -> Iterator[tuple[str, T]]:
    if isinstance(value, kind):
        yield path, value
    elif depth < MOST_DEPTH and not isinstance(value, Tensor | nn.Module | type):
        for step, inner in _parts(value):
            yield from _inside(inner, path + step, kind, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in list(value.items())[:MOST_ITEMS]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", inner) for name, inner in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value[:MOST_ITEMS])]
    if dataclasses.is_dataclass(value) or type(value).__module__ not in ("builtins", "functools"):
        return [(f".{name}", inner) for name, inner in _attributes(value).items()]
    return []


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class; libraries' objects are skipped."""
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", "runner") and not dataclasses.is_dataclass(value):
        return {}
    return dict(getattr(value, "__dict__", {}))
