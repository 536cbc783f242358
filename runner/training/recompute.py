"""Makes modules compute their activations again in the backward pass instead of keeping them: train.recompute.

experiment/build.py calls it before a model is split across processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.training.optimizer import matching

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def recompute(model: nn.Module, patterns: Sequence[str], *, device: torch.device, prefix: str = "") -> None:
    """Make the outermost modules that a pattern matches keep only their inputs until the backward pass.

    A pattern is a module's path, with * and ?. Results are bitwise identical: generators are restored for the second forward
    pass, and running statistics change once.

    Args:
        prefix: Of all paths, not part of the patterns.

    Raises:
        RunnerError: For a pattern that matches no module.
    """
    named = {name.removeprefix(prefix): module for name, module in model.named_modules() if name.removeprefix(prefix)}
    found: set[str] = set()
    for pattern in patterns:
        found |= matching(pattern, list(named), key="train.recompute", kind="module")
    for name, module in named.items():
        parents = {name[:at] for at, letter in enumerate(name) if letter == "."}
        is_inner = any(parent in found and not isinstance(named[parent], CONTAINERS) for parent in parents)
        if name in found and not is_inner and not isinstance(module, CONTAINERS):
            _recompute(module, device)


def repeated(model: nn.Module, *, prefix: str = "") -> str:
    """The pattern of a model's blocks: two or more children of one class, of the largest such container; "" without one."""
    found = {
        f"{name.removeprefix(prefix)}.*": sum(1 for _ in module.modules())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name.removeprefix(prefix)
        if len(module) > 1 and len({type(child) for child in module}) == 1 and any(module[0].children())
    }
    return max(found, key=lambda name: found[name], default="")


def _recompute(module: nn.Module, device: torch.device) -> None:
    kind = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        at = next((parameter.device for parameter in self.parameters()), device)
        contexts = partial(_contexts, self, at)
        own = partial(kind.forward, self)
        return checkpoint(own, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _contexts(
    module: nn.Module, device: torch.device
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    before = [get() for get, _ in _generators(device)]
    return nullcontext(), _as_before(module, before, device)


@contextmanager
def _as_before(module: nn.Module, before: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Restore the generators, and replace running statistics by copies, as autograd saved the originals."""
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


def _generators(device: torch.device) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    # not backends.generator_states: this runs in each step, and a plan would count its conversions as reads
    found: list[Any] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    if device.type != "cpu" and hasattr(of_kind := getattr(torch, device.type), "get_rng_state"):
        at = () if device.type == "mps" else (device,)
        found.append((partial(of_kind.get_rng_state, *at), lambda state: of_kind.set_rng_state(state, *at)))
    return found


def _statistics(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    norms = [each for each in module.modules() if each.training and getattr(each, "running_mean", None) is not None]
    return [
        (each._buffers, name, value) for each in norms for name, value in each._buffers.items() if value is not None
    ]
