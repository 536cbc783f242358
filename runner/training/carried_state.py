"""Finds, saves and restores state outside state_dict(): attributes of modules and of the task that a forward pass changes.

For checkpoints (state.py), and for forward passes that may not change the training (evaluate.py, hooks.py).
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.device.torch_private import foreach_copy_

PLAIN = (bool, int, float, complex, str, bytes, type(None))
STATELESS = (nn.Parameter, nn.Module, type, BuiltinFunctionType, FunctionType, MethodType, ModuleType, partial)
#: attributes that every module has
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
#: keys of values in a checkpoint that are not tensors of the run's device
ARRAY, ON_HOST = "numpy array", "tensor on the CPU"


class CarriedState:
    """The state of a model and a task outside state_dict(): attributes that have changed since this was made.

    Tensors, arrays, numbers, texts, containers of them, generators, and objects with state_dict() and load_state_dict() are
    saved. So are non-persistent buffers, all buffers of a task, and the whole state of a task that has these two methods.
    """

    def __init__(self, model: nn.Module, task: object, *, device: torch.device) -> None:
        self._owners, self._device = _owners(model, task), device
        self._begun = {name: marks(value) for name, value in self._values()}
        self._pickled = {name: _digest(value) for name, value in self._values() if _has_opaque(value)}

    def state(self) -> dict[str, Any]:
        """Return what has changed and can be saved, by full names such as model.rnn.hidden."""
        return self._split()[0]

    def unsaved(self) -> list[str]:
        """Return the names of what has changed and can't be saved. Takes as long as pickling it."""
        names = self._split()[1]
        for name, value in self._values():
            if _has_opaque(value):
                digest = _digest(value)
                is_unknown = digest == "" and (name.startswith("task") or hasattr(value, "__next__"))
                names += [name] if is_unknown or digest != self._pickled.get(name) else []
        return list(dict.fromkeys(names))

    def load_state(self, state: Mapping[str, Any], model: nn.Module | None = None) -> None:
        """Restore what state() returned; `model`: into another one of the same structure."""
        owners = self._owners if model is None else self._owners | _owners(model, None)
        for name, saved in state.items():
            owner_name, _, attribute = name.rpartition(".")
            owner: Any = owners[owner_name]
            if model is not None and owner_name.startswith("task"):
                continue
            if not attribute:
                _loaded(owner, saved, self._device)
            else:
                place = owner._buffers if attribute in getattr(owner, "_buffers", ()) else vars(owner)
                place[attribute] = _loaded(place.get(attribute), saved, self._device)

    def replaced(self) -> list[str]:
        """Return the names of values that have changed other than in place, which a captured step can't follow."""
        now = {name: [thing for thing, _ in marks(value)] for name, value in self._values()}
        return [name for name, things in now.items() if things != [thing for thing, _ in self._begun.get(name, [])]]

    def _split(self) -> tuple[dict[str, Any], list[str]]:
        saved, unsaved = dict[str, Any](), list[str]()
        for name, value in self._values():
            if marks(value) != self._begun.get(name):
                try:
                    saved[name] = _saved(value, self._device)
                except TypeError:
                    unsaved.append(name.rstrip("."))
        return saved, unsaved

    def _values(self) -> Iterator[tuple[str, Any]]:
        owners = {id(owner) for owner in self._owners.values()}
        owner: Any
        for owner_name, owner in self._owners.items():
            is_task = owner_name.startswith("task")
            if is_task and _methods(owner) is not None:
                yield f"{owner_name}.", owner
            if isinstance(owner, nn.Module) or _methods(owner) is None:
                for place, names in places(owner):
                    is_of_model = place is getattr(owner, "_buffers", None) and not is_task
                    left_out = owner._buffers.keys() - owner._non_persistent_buffers_set if is_of_model else ()
                    for name in names:
                        if name not in left_out and id(place[name]) not in owners:
                            yield f"{owner_name}.{name}", place[name]


@contextmanager
def restored(model: nn.Module, task: object) -> Iterator[None]:
    """Restore buffers and attributes of a model and a task after the block, also those that it changes in place."""
    with ExitStack() as undo:
        for owner in _owners(model, task).values():
            _remember_methods(owner, undo)
            if isinstance(owner, nn.Module) or _methods(owner) is None:
                for place, names in places(owner):
                    undo.callback(put_back, owner, place, {name: place[name] for name in names})
                    for name in names:
                        _remember(place[name], undo)
        yield


@contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Put modules in eval mode for the block; restores the mode of each module and the gradient of each parameter."""
    roots = [part for part in parts if isinstance(part, nn.Module)]
    modes = [(module, module.training) for root in roots for module in root.modules()]
    gradients = [(parameter, parameter.grad) for root in roots for parameter in root.parameters()]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        for parameter, gradient in gradients:
            parameter.grad = gradient


class TensorCopies:
    """Copies of tensors, to undo a step that failed or was only tried. Nothing waits for the device."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the tensors again, by one kernel."""
        if self._tensors:
            foreach_copy_(self._copies, self._tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        if self._tensors:
            foreach_copy_(self._tensors, self._copies)


def reset_state(model: nn.Module, task: object) -> None:
    """Reset the modules and the task that have a `reset_state()`, at the start of each pass over a split."""
    for owner in _owners(model, task).values():
        if callable(reset := getattr(owner, "reset_state", None)):
            reset()


def _owners(model: nn.Module, task: object) -> dict[str, object]:
    """Return the model's modules other than torch's, the task, and the object whose method the task calls, by name."""
    owners: dict[int, tuple[str, object]] = {}
    for name, part in {"model": model, "task": task, "task.function": getattr(task, "function", None)}.items():
        part = part.func if isinstance(part, partial) else part
        part = part.__self__ if isinstance(part, MethodType) else part
        for full_name, owner in part.named_modules(prefix=name) if isinstance(part, nn.Module) else [(name, part)]:
            is_torchs = isinstance(owner, nn.Module) and type(owner).__module__.startswith("torch.")
            if owner is not None and not is_torchs:
                owners.setdefault(id(owner), (full_name, owner))
    return dict(owners.values())


def places(owner: object) -> Iterator[tuple[MutableMapping[str, Any], list[str]]]:
    """Yield each mapping that holds an object's values, with the names of the values."""
    is_module = isinstance(owner, nn.Module)
    if isinstance(own := getattr(owner, "__dict__", None), dict):
        yield own, [name for name in own if not (name.startswith("__") or (is_module and name in MODULE_ATTRIBUTES))]
    if isinstance(owner, nn.Module):
        yield owner._buffers, list(owner._buffers)


def _methods(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return the methods that save and load an object's whole state; None without them."""
    names = "state_dict", "load_state_dict"
    if isinstance(value, nn.Module):
        if type(value).get_extra_state is nn.Module.get_extra_state:
            return None
        names = "get_extra_state", "set_extra_state"
    get, load = (None if isinstance(value, type) else getattr(value, name, None) for name in names)
    return (get, load) if callable(get) and callable(load) else None


def _items(value: Any) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | deque) else None


class _Same:
    """An object that equals only itself. It is kept, so that no other one gets its address."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = object.__hash__


def marks(value: Any) -> list[tuple[Any, Any]]:
    """Return for each part of a value a mark that differs if it is replaced, and one that differs if it changes in place."""
    if isinstance(value, STATELESS):
        return []
    if isinstance(value, Tensor):
        return [(_Same(value), 0 if value.is_inference() else value._version)]
    if (items := _items(value)) is not None:
        keys = list(value) if isinstance(value, dict) else len(value)
        return [(keys, None), *(mark for each in items for mark in marks(each))]
    if isinstance(value, np.ndarray):
        return [(_Same(value), _digest(value))]
    if isinstance(value, torch.Generator) or _methods(value) is not None:
        return [(_Same(value), object())]  # they change unseen
    return [(value if type(value) in PLAIN else _Same(value), None)]


def _has_opaque(value: Any) -> bool:
    if (items := _items(value)) is not None:
        return any(map(_has_opaque, items))
    known = (*STATELESS, *PLAIN, Tensor, np.ndarray, np.generic, torch.Generator)
    return not isinstance(value, known) and _methods(value) is None


def _digest(value: Any) -> str:
    """Return a hash of a pickled value, or an empty text if it can't be pickled."""
    digest = hashlib.sha256()
    file: Any = SimpleNamespace(write=digest.update)  # nothing is kept in memory
    try:
        pickle.Pickler(file, protocol=5).dump(value)
    except Exception:  # any object's own
        return ""
    return digest.hexdigest()


def _saved(value: Any, device: torch.device) -> Any:
    """Return a value as a checkpoint stores it. Raises: TypeError for a type that is not saved."""
    if isinstance(value, Tensor):
        return value.detach() if value.device.type == device.type else {ON_HOST: value.detach()}
    if isinstance(value, dict):
        return {_saved(key, device): _saved(each, device) for key, each in value.items()}
    if (items := _items(value)) is not None:
        each = [_saved(item, device) for item in items]
        return tuple(each) if isinstance(value, tuple) else each
    if isinstance(value, np.ndarray | np.generic):
        return {ARRAY: torch.from_numpy(np.array(value))}
    if isinstance(value, torch.Generator):
        return {ON_HOST: value.get_state()}
    if (methods := _methods(value)) is not None:
        return _saved(methods[0](), device)
    if type(value) not in PLAIN:
        raise TypeError(type(value).__name__)
    return value


def _loaded(now: Any, saved: Any, device: torch.device) -> Any:
    """Return a saved value; the present object `now` if it can take the value in place."""
    if isinstance(now, torch.Generator):
        return now.set_state(saved[ON_HOST])
    if (methods := _methods(now)) is not None:
        methods[1](_loaded(None, saved, device))
        return now
    if isinstance(saved, Tensor):
        is_alike = isinstance(now, Tensor) and (now.shape, now.dtype) == (saved.shape, saved.dtype)
        if is_alike and now.is_contiguous() and not now.requires_grad:
            return now.copy_(saved)
        return saved.to(device, copy=True)  # the memory is used for the next checkpoints
    if isinstance(saved, dict):
        if saved.keys() == {ARRAY}:
            return saved[ARRAY].numpy().copy()[()]
        if saved.keys() == {ON_HOST}:
            return saved[ON_HOST].clone()
        before = now if isinstance(now, dict) else {}
        return {key: _loaded(before.get(key), each, device) for key, each in saved.items()}
    if isinstance(saved, list | tuple):
        fits = isinstance(now, list | tuple) and len(now) == len(saved)
        each = [_loaded(now[at] if fits else None, value, device) for at, value in enumerate(saved)]
        return deque(each, now.maxlen) if isinstance(now, deque) else type(saved)(each)
    return saved


def put_back(owner: object, place: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    for name in next(names for other, names in places(owner) if other is place):
        if name not in values:
            del place[name]
    for name, value in values.items():
        if place.get(name) is not value:
            place[name] = value


def _remember_methods(value: Any, undo: ExitStack) -> None:
    if (methods := _methods(value)) is not None:
        undo.callback(methods[1], copy.deepcopy(methods[0]()))


def _remember(value: Any, undo: ExitStack) -> None:
    """Add what restores an object that is changed in place."""
    if isinstance(value, STATELESS):
        return
    if isinstance(value, Tensor):
        if not value.is_inference():
            undo.callback(_copy_back, value, value._version, value.detach().clone())
    elif isinstance(value, np.ndarray):
        undo.callback(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        undo.callback(value.set_state, value.get_state())
    elif (items := _items(value)) is not None:
        if not isinstance(value, tuple):
            undo.callback(_refill, value, copy.copy(value))
        for each in items:
            _remember(each, undo)
    else:
        _remember_methods(value, undo)


@torch.no_grad()
def _copy_back(tensor: Tensor, version: int, before: Tensor) -> None:
    if tensor._version != version:
        tensor.copy_(before)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.update(before) if isinstance(container, dict) else container.extend(before)


def unsaved_in_words(names: Sequence[str]) -> str:
    """Say what a checkpoint doesn't have, and what helps."""
    named = ", ".join(f"`{name}`" for name in names)
    ways = "give a task `state_dict()` and `load_state_dict()`, or a module `get_extra_state()` and `set_extra_state()`"
    return f"{named} can't be saved, so a resumed run may differ; help: use tensors, arrays or numbers, or {ways}"
