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
EXTRA_REQUIREMENT = re.compile(r"(.+?)\s*;\s*extra == ['\"]([\w-]+)['\"]")


def install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    if _project():
        return f'pip install -e "{_checkout()}[{extra}]"'
    lines = filter(None, map(EXTRA_REQUIREMENT.fullmatch, _requirements()))
    names = [f'"{line[1]}"' if re.search(r"[<>=!~]", line[1]) else line[1] for line in lines if line[2] == extra]
    return " ".join(("pip install", *names)) if names else f"the packages of the extra {extra} in pyproject.toml"


def not_installed(source: str, problem: str, extra: str) -> RunnerError:
    """Return the error of a setting whose optional packages are missing."""
    command = install(extra)
    fix = f"run `{command}`" if command.startswith("pip") else f"install {command}"
    return RunnerError.of(source, problem, fix, code="missing-package")


def missing(error: ModuleNotFoundError) -> RunnerError | None:
    """Return the error of a package that every run needs; None if another module was not found."""
    name = str(error.name).partition(".")[0]
    needed = [re.split(r"[<>=!~; ]", line)[0] for line in _requirements() if "extra ==" not in line]
    package = next((each for each in needed if IMPORTED_AS.get(each, each) == name), None)
    if package is None or util.find_spec(name) is not None:  # a module of the package is missing
        return None
    what = f"-e {shlex.quote(_checkout())}" if _project() else package
    fix = f"run `{shlex.quote(sys.executable)} -m pip install {what}`"  # `pip` may be another Python's
    problem = f"this Python has no {name}, which the runner imports"
    return RunnerError.of("python -m runner", problem, fix, code="missing-package")


def _requirements() -> list[str]:
    try:
        return _project().get("dependencies") or metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a copy of the folder
        return ["hydra-core", "torch"]


def _checkout() -> str:
    return "." if Path.cwd() == PACKAGES else str(PACKAGES)


def _project() -> dict[str, Any]:
    """Return the table `project` of the checkout's pyproject.toml; {} without a checkout."""
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeError):
        project: dict[str, Any] = tomllib.loads((PACKAGES / "pyproject.toml").read_text()).get("project", {})
        return project if project.get("name") == DISTRIBUTION else {}
    return {}
