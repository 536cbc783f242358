"""The public names of our packages, which are imported when they are first used, and the parts that a configuration may name.

Our own parts are public names of their package: other functions of their modules write files and download. YAML, rerun.yaml
and model.json name what a package exports, never its modules, so that files can move. In torch and torchmetrics parts are
layers, losses, optimizers, schedules, metrics and functions of numbers.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from runner.version import PACKAGES

#: public names that write files
NO_PARTS = ("runner.data.write_tokens",)


def homes(package: str) -> dict[str, str]:
    """Return the module of each public name of a package: the imports for type checkers in its `__init__.py`."""
    text = (PACKAGES / package.replace(".", "/") / "__init__.py").read_text()
    return {name: home for home, name in re.findall(r"^    from (\S+) import (\w+) as \2$", text, re.MULTILINE)}


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__` (PEP 562: --help does not load torch), `__dir__` and `__all__`."""
    modules = homes(package)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, names, [*modules]


#: our parts, which conf/ and the nodes that runs write name
PARTS = tuple(
    path
    for package in ("runner.data", "runner.models", "runner.training", "runner.tasks")
    for path in (f"{package}.{name}" for name in homes(package))
    if path not in NO_PARTS
)
FUNCTION = "function"
METRIC = ("torchmetrics.metric.Metric",)
#: metrics that only calculate: others download weights
METRICS = {
    f"torchmetrics.{name}": METRIC
    for name in ("classification", "regression", "aggregation", "image.psnr", "image.ssim")
}
#: by the module that defines a part: its base classes, or "function"
KINDS: dict[str, tuple[str, ...]] = {
    "torch.nn.modules": ("torch.nn.modules.module.Module",),
    "torch.nn.functional": (FUNCTION,),
    "torch.nn.init": (FUNCTION,),
    "torch.nn.utils.parametrizations": (FUNCTION,),
    "torch.nn.utils.spectral_norm": (FUNCTION,),
    "torch.nn.utils.weight_norm": (FUNCTION,),
    "torch.optim": ("torch.optim.optimizer.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    **METRICS,
}
#: prefixes of their names; other modules are not imported
LIBRARIES = ("torch.nn", "torch.optim", *METRICS)


def is_part(thing: Any, home: str) -> bool:
    """Return whether an object of LIBRARIES, defined in the module `home`, is a part."""
    kinds = next((kinds for room, kinds in KINDS.items() if under(home, (room,))), ())
    if inspect.isclass(thing):
        return any(f"{base.__module__}.{base.__qualname__}" in kinds for base in thing.__mro__)
    return FUNCTION in kinds and inspect.isfunction(thing)


def public_name(path: str, names: tuple[str, ...] = PARTS) -> str | None:
    """Return the part that a path to one of our modules means: runner.models.MLP for runner.models.mlp.MLP."""
    if not path.startswith("runner.") or path in names:
        return None
    return next((name for name in names if name.rpartition(".")[2] == path.rpartition(".")[2]), None)


def exported_name(path: str) -> str:
    """Return runner.models.MLP for runner.models.mlp.MLP, and any other path as it is."""
    public = public_name(path)
    package, _, name = (public or "").rpartition(".")
    return public if public and path == f"{homes(package)[name]}.{name}" else path


def under(path: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a path is one of the prefixes or below one: torch.nnx is not below torch.nn."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)
