"""Places the modules of a model on several devices, as placement.map says by path; copies where one hands on to another.

Called once a run by experiment/build.py. What passes a border is copied in the step, and its gradient on the way back:
between GPUs without a wait of the host; to or from the CPU the host waits. The devices take turns: it gives room for a
model that no single one holds, and no speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from runner.device.placement import move, num_bytes, place
from runner.errors import Fault, nearest, refuse

#: their items hand on to each other, in the order of the list
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def spread(
    model: nn.Module, device: torch.device, devices: Mapping[str, str], *, prefix: str = ""
) -> dict[torch.device, int]:
    """Places the model on `device` but for the modules named in `devices`; returns how many bytes lie where.

    devices: by module path (`encoder`, `blocks.3`), with * and ? for what varies; the longest one that fits decides, and
    holds for all below it. prefix: what stands before the paths a person knows. A module gets what it is called with on
    its own device. What it gives goes to the device of the module around it; an item of a Sequential, a ModuleList or a
    ModuleDict leaves it where it is, for the next item.
    Raises: RunnerError for a path that no module has, and for weights that modules on two devices share.
    """
    where = _where(model, device, devices, prefix=prefix)
    _check_shared(model, where, prefix=prefix)
    modules = dict(model.named_modules())
    for path, module in modules.items():
        place(module, where[path], recurse=False)
    borders = {
        ancestor for path in modules if path and where[path] != where[_around(path)] for ancestor in _all_around(path)
    }
    for path, module in modules.items():
        if path and _around(path) in borders:
            module.register_forward_pre_hook(_Enter(where[path]), with_kwargs=True)
        if path in borders or (path and _around(path) in borders):
            is_item = bool(path) and isinstance(modules[_around(path)], LISTS)
            if not is_item:
                module.register_forward_hook(_Leave(where[_around(path)] if path else device))
    sizes: dict[torch.device, int] = {}
    for path, module in modules.items():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        sizes[where[path]] = sizes.get(where[path], 0) + num_bytes(own)
    return {at: size for at, size in sizes.items() if size}


@dataclass(frozen=True)
class _Enter:
    device: torch.device

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return move(args, self.device), move(kwargs, self.device)


@dataclass(frozen=True)
class _Leave:
    device: torch.device

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return move(output, self.device)


def _where(
    model: nn.Module, device: torch.device, devices: Mapping[str, str], *, prefix: str
) -> dict[str, torch.device]:
    paths = [path for path, _ in model.named_modules()]
    known = [path.removeprefix(prefix) for path in paths if path and path != prefix.rstrip(".")]
    faults = []
    for pattern, value in devices.items():
        if not any(fnmatchcase(path, pattern) for path in known):
            tops = [path for path in known if "." not in path]
            hits = nearest(pattern.strip("*."), known) or tops[:4]
            problem = f"the model has no module of this path; it has {', '.join(tops[:8])}"
            faults.append(Fault(f"placement.map={{{pattern}: {value}}}", problem, " or ".join(hits)))
    refuse(faults)
    where: dict[str, torch.device] = {}
    for path in paths:  # a module comes after the one around it
        own = path.removeprefix(prefix)
        fitting = [pattern for pattern in devices if fnmatchcase(own, pattern)]
        if fitting:
            where[path] = torch.device(devices[max(fitting, key=lambda pattern: (pattern == own, len(pattern)))])
        else:
            where[path] = where[_around(path)] if path else device
    return where


def _check_shared(model: nn.Module, where: Mapping[str, torch.device], *, prefix: str) -> None:
    first: dict[int, tuple[str, str]] = {}
    faults = []
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            before, other = first.setdefault(id(tensor), (path, name))
            if where[before] != where[path]:
                names = [f"{at}.{of}".removeprefix(prefix) for at, of in ((before, other), (path, name))]
                problem = f"{names[0]} and {names[1]} are one tensor, on {where[before]} and {where[path]}"
                fix = "one device for both modules"
                faults.append(Fault(f"placement.map: {path.removeprefix(prefix)}", problem, fix))
    refuse(faults)


def _around(path: str) -> str:
    return path.rpartition(".")[0]


def _all_around(path: str) -> list[str]:
    found = []
    while path:
        path = _around(path)
        found.append(path)
    return found
