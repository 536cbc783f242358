"""Makes a package's `__getattr__` and `__dir__`, by which its public names are imported when they are first used.

What YAML, rerun.yaml and model.json name is what a package exports, never the module that it lies in: so files can move. And a
package that is imported loads none of them: torch is not on the way to --help (PEP 562).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from runner.config.allowed import public_name


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's `__getattr__` and `__dir__`. homes: public name -> the module below the package that defines it."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names


def exported_name(path: str) -> str:
    """The name that a package exports for the path of its definition; another path as it is.

    runner.models.mlp.MLP is runner.models.MLP, which decides what a configuration may name.
    """
    public = public_name(path)
    if public is None:
        return path
    package, _, name = public.rpartition(".")
    return public if path == f"{package}.{importlib.import_module(package).HOMES[name]}.{name}" else path
