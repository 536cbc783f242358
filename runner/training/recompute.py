"""Makes modules compute their activations again in the backward pass instead of keeping them: train.recompute.

experiment/build.py calls it before a model is split across processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.errors import RunnerError
from runner.training.carried_state import marks, places, put_back
from runner.training.optimizer import matching

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: modules, where their attributes or buffers are, and these by name
Attributes = list[tuple[nn.Module, MutableMapping[str, Any], dict[str, Any]]]


def recompute(model: nn.Module, patterns: Sequence[str], *, device: torch.device, prefix: str = "") -> None:
    """Make the outermost modules that a pattern matches keep only their inputs until the backward pass.

    A pattern is a module's path, with * and ?. Results are bitwise identical: generators and attributes are restored for the
    second forward pass, and running statistics change once.

    Args:
        prefix: Of all paths, not part of the patterns.

    Raises:
        RunnerError: For a pattern that matches no module.
    """
    named = {name.removeprefix(prefix): module for name, module in model.named_modules() if name.removeprefix(prefix)}
    chosen: set[str] = set()
    for pattern in patterns:
        chosen |= matching(pattern, list(named), key="train.recompute", kind="module")
    for name, module in named.items():
        parents = {name[:at] for at, letter in enumerate(name) if letter == "."}
        is_inner = any(parent in chosen and not isinstance(named[parent], CONTAINERS) for parent in parents)
        if name in chosen and not is_inner and not isinstance(module, CONTAINERS):
            _recompute(module, device)


def repeated(model: nn.Module, *, prefix: str = "") -> str:
    """The pattern of a model's blocks: two or more children of one class, of the largest such container; "" without one."""
    sizes = {
        f"{name.removeprefix(prefix)}.*": sum(1 for _ in module.modules())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name.removeprefix(prefix)
        if len(module) > 1 and len({type(child) for child in module}) == 1 and any(module[0].children())
    }
    return max(sizes, key=lambda name: sizes[name], default="")


def _recompute(module: nn.Module, device: torch.device) -> None:
    kind, is_checked = type(module), False

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_checked
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        at = next((parameter.device for parameter in self.parameters()), device)
        contexts = partial(_contexts, self, at, is_first=not is_checked)
        is_checked = True
        own = partial(kind.forward, self)
        return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _contexts(
    module: nn.Module, device: torch.device, *, is_first: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    before, attributes = [get() for get, _ in _generators(device)], _attributes(module)
    checks = _unchanged_in_place(module, attributes) if is_first else nullcontext()
    return checks, _as_before(module, before, attributes, device)


@contextmanager
def _unchanged_in_place(module: nn.Module, attributes: Attributes) -> Iterator[None]:
    """Refuse a forward pass that changes an attribute in place, since the second one would begin with the changed value."""
    before = [{name: marks(value) for name, value in values.items()} for _, _, values in attributes]
    yield
    for (owner, place, values), marked in zip(attributes, before, strict=True):
        if getattr(owner, "running_mean", None) is None:
            for name, value in values.items():
                if place.get(name) is value and marks(value) != marked[name]:
                    problem = (
                        f"its forward pass runs twice in a step, and changes `{type(owner).__name__}.{name}` in place"
                    )
                    fix = f"replace the value (`self.{name} = ...`), or leave the module out of `train.recompute`"
                    raise RunnerError.of(f"train.recompute of a {type(module).__name__}", problem, fix, code="conflict")


@contextmanager
def _as_before(
    module: nn.Module, before: Sequence[Any], attributes: Attributes, device: torch.device
) -> Iterator[None]:
    """Restore generators and attributes, and replace running statistics by copies, as autograd saved the originals."""
    changed = _attributes(module)
    _put_back(attributes)
    generators, statistics = _generators(device), _statistics(module)
    now = [get() for get, _ in generators]
    for (_, put), state in zip(generators, before, strict=True):
        put(state)
    for buffers, name, value in statistics:
        buffers[name] = value.clone()
    try:
        yield
    finally:
        for buffers, name, value in statistics:
            buffers[name] = value
        for (_, put), state in zip(generators, now, strict=True):
            put(state)
        _put_back(changed)


def _attributes(module: nn.Module) -> Attributes:
    owned = [(each, place, names) for each in module.modules() for place, names in places(each)]
    return [(each, place, {name: place[name] for name in names}) for each, place, names in owned]


def _put_back(attributes: Attributes) -> None:
    for owner, place, values in attributes:
        put_back(owner, place, values)


def _generators(device: torch.device) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    # not backends.generator_states: this runs in each step, and a plan would count its conversions as reads
    generators: list[Any] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    if device.type != "cpu" and hasattr(of_kind := getattr(torch, device.type), "get_rng_state"):
        at = () if device.type == "mps" else (device,)
        generators.append((partial(of_kind.get_rng_state, *at), lambda state: of_kind.set_rng_state(state, *at)))
    return generators


def _statistics(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    norms = [each for each in module.modules() if each.training and getattr(each, "running_mean", None) is not None]
    return [
        (each._buffers, name, value) for each in norms for name, value in each._buffers.items() if value is not None
    ]
