"""Imports the public names of a package when they are first used (PEP 562): --help does not load torch.

YAML, rerun.yaml and model.json name what a package exports, never its modules, so that files can move.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from runner.config.allowed import homes, public_name


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`."""
    modules = homes(package)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, names, [*modules]


def exported_name(path: str) -> str:
    """Return runner.models.MLP for runner.models.mlp.MLP, and any other path as it is."""
    public = public_name(path)
    if public is None:
        return path
    package, _, name = public.rpartition(".")
    return public if path == f"{homes(package)[name]}.{name}" else path
