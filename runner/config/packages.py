"""The commands that install missing packages, for messages: the checkout, or the packages by name.

The runner's own distribution is not on a public index, where anything could have its name.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata, util
from pathlib import Path

from runner.errors import RunnerError
from runner.version import DISTRIBUTION, PACKAGES

PYPROJECT = PACKAGES / "pyproject.toml"
#: packages that are imported by another name
DISTRIBUTED_AS = {"hydra": "hydra-core", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
#: a line of the metadata: optuna>=4.9; extra == 'search'
EXTRA_REQUIREMENT = re.compile(r"(.+?)\s*;\s*extra == ['\"]([\w-]+)['\"]")


def install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    if checkout := _checkout():
        return f'pip install -e "{checkout}[{extra}]"'
    lines = filter(None, map(EXTRA_REQUIREMENT.fullmatch, _requirements()))
    names = [f'"{line[1]}"' if re.search(r"[<>=!~]", line[1]) else line[1] for line in lines if line[2] == extra]
    return " ".join(("pip install", *names)) if names else f"the packages of the extra {extra} in pyproject.toml"


def not_installed(source: str, problem: str, extra: str) -> RunnerError:
    """Return the error of a setting whose optional packages are missing."""
    command = install(extra)
    fix = f"run `{command}`" if command.startswith("pip") else f"install {command}"
    return RunnerError.of(source, problem, fix, code="missing-package")


def missing(error: ModuleNotFoundError) -> RunnerError | None:
    """Return the error of a package that the runner requires; None if another module was not found, or a part of a package."""
    name = str(error.name).partition(".")[0]
    package, checkout = DISTRIBUTED_AS.get(name, name), _checkout()
    required = PYPROJECT.read_text(encoding="utf-8") if checkout else " ".join(_requirements())
    if not re.search(rf"\b{re.escape(package)}\b", required) or util.find_spec(name) is not None:
        return None
    what = f"-e {shlex.quote(checkout)}" if checkout else package
    fix = f"run `{shlex.quote(sys.executable)} -m pip install {what}`"  # `pip` may be another Python's
    problem = f"this Python has no {name}, which the runner imports"
    return RunnerError.of("python -m runner", problem, fix, code="missing-package")


def _requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a copy of the folder
        return []


def _checkout() -> str:
    """Return the directory of the checkout, as the user may type it; "" for an installed package."""
    if not PYPROJECT.is_file() or f'name = "{DISTRIBUTION}"' not in PYPROJECT.read_text(encoding="utf-8"):
        return ""
    return "." if Path.cwd() == PACKAGES else str(PACKAGES)
