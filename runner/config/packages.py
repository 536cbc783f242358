"""Gives the command that installs an optional dependency's packages, for messages.

In a checkout that is an extra of it; elsewhere the packages are named themselves. The distribution never is: it is on no public
index, and whoever takes its name there could put anything behind it.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from runner.version import DISTRIBUTION, PACKAGES

#: a line of the metadata, as hatchling writes it: optuna>=4.9; extra == 'search'
OF_AN_EXTRA = re.compile(r"(.+?)\s*;\s*extra == ['\"]([\w-]+)['\"]")


def install(extra: str) -> str:
    """A line for a shell. extra: one of pyproject.toml."""
    if _is_checkout(PACKAGES):
        return f'pip install -e "{"." if Path.cwd() == PACKAGES else PACKAGES}[{extra}]"'
    try:
        lines = filter(None, map(OF_AN_EXTRA.fullmatch, metadata.requires(DISTRIBUTION) or ()))
    except metadata.PackageNotFoundError:  # a copy of the folder
        return f"the packages of the extra {extra} in the runner's pyproject.toml"
    names = [line[1] for line in lines if line[2] == extra]
    return " ".join(("pip install", *(f'"{name}"' if re.search(r"[<>=!~]", name) else name for name in names)))


def _is_checkout(folder: Path) -> bool:
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeError):
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        return bool(project.get("name") == DISTRIBUTION)
    return False
