"""Imports the public names of a package when they are first used (PEP 562): --help does not load torch.

YAML, rerun.yaml and model.json name what a package exports, never its modules, so that files can move.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from runner.config.allowed import public_name


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`. homes: the module of each public name."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names


def exported_name(path: str) -> str:
    """Return runner.models.MLP for runner.models.mlp.MLP, and any other path as it is."""
    public = public_name(path)
    if public is None:
        return path
    package, _, name = public.rpartition(".")
    return public if path == f"{package}.{importlib.import_module(package).HOMES[name]}.{name}" else path
