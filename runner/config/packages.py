"""The commands that install missing packages, for messages: the checkout, or the packages by name.

The runner's own distribution is not on a public index, where anything could have its name.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.version import DISTRIBUTION, PACKAGES

#: packages that are imported by another name
IMPORTED_AS = {"hydra-core": "hydra", "pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
#: a line of the metadata: optuna>=4.9; extra == 'search'
OF_AN_EXTRA = re.compile(r"(.+?)\s*;\s*extra == ['\"]([\w-]+)['\"]")


def install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    if _is_checkout(PACKAGES):
        return f'pip install -e "{_checkout()}[{extra}]"'
    try:
        lines = filter(None, map(OF_AN_EXTRA.fullmatch, metadata.requires(DISTRIBUTION) or ()))
    except metadata.PackageNotFoundError:  # a copy of the folder
        return f"the packages of the extra {extra} in the runner's pyproject.toml"
    names = [line[1] for line in lines if line[2] == extra]
    return " ".join(("pip install", *(f'"{name}"' if re.search(r"[<>=!~]", name) else name for name in names)))


def not_installed(source: str, problem: str, extra: str) -> RunnerError:
    """Return the error of a setting whose optional packages are missing."""
    command = install(extra)
    fix = f"run `{command}`" if command.startswith("pip") else f"install {command}"
    return RunnerError.of(source, problem, fix, code="missing-package")


def missing(error: ModuleNotFoundError) -> RunnerError | None:
    """Return the error of packages that every run needs; None if another module was not found."""
    lacking = [package for package in _needed() if not _is_here(IMPORTED_AS.get(package, package))]
    name = str(error.name).partition(".")[0]
    if name not in [IMPORTED_AS.get(package, package) for package in lacking]:
        return None
    what = f"-e {shlex.quote(_checkout())}" if _is_checkout(PACKAGES) else " ".join(lacking)
    fix = f"run `{shlex.quote(sys.executable)} -m pip install {what}`"  # `pip` may be another Python's
    problem = f"this Python has no {name}, which the runner imports"
    return RunnerError.of("python -m runner", problem, fix, code="missing-package")


def _needed() -> list[str]:
    try:
        lines = _project(PACKAGES).get("dependencies") or metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:  # a copy of the folder
        return ["hydra-core", "torch"]
    return [re.split(r"[<>=!~; ]", line)[0] for line in lines if "extra ==" not in line]


def _is_here(module: str) -> bool:
    with suppress(ValueError):  # a module in sys.modules without a spec
        return util.find_spec(module) is not None
    return sys.modules.get(module) is not None


def _checkout() -> str:
    return "." if Path.cwd() == PACKAGES else str(PACKAGES)


def _is_checkout(folder: Path) -> bool:
    return bool(_project(folder).get("name") == DISTRIBUTION)


def _project(folder: Path) -> dict[str, Any]:
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeError):
        project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        return project
    return {}
