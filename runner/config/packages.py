"""Gives the command that installs the packages that are missing, the runner's own or an extra's, for messages.

In a checkout that is the checkout; elsewhere the packages are named themselves. The distribution never is: it is on no public
index, and whoever takes its name there could put anything behind it.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

from runner.errors import Problem, RunnerError
from runner.version import DISTRIBUTION, PACKAGES

#: the dependencies in pyproject.toml that are imported by another name than they are installed by
IMPORTED_AS = {"hydra-core": "hydra", "pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
#: all of them, as they are installed: a copy of the folder has no metadata and perhaps no pyproject.toml
NEEDED = (
    "filelock",
    "hydra-core",
    "jinja2",
    "matplotlib",
    "mlflow",
    "numpy",
    "omegaconf",
    "pandas",
    "pillow",
    "plotly",
    "psutil",
    "pyarrow",
    "pyyaml",
    "rich",
    "scikit-learn",
    "scipy",
    "torch",
)

#: a line of the metadata, as hatchling writes it: optuna>=4.9; extra == 'search'
OF_AN_EXTRA = re.compile(r"(.+?)\s*;\s*extra == ['\"]([\w-]+)['\"]")


def install(extra: str) -> str:
    """A line for a shell. extra: one of pyproject.toml."""
    if _is_checkout(PACKAGES):
        return f'pip install -e "{_checkout()}[{extra}]"'
    try:
        lines = filter(None, map(OF_AN_EXTRA.fullmatch, metadata.requires(DISTRIBUTION) or ()))
    except metadata.PackageNotFoundError:  # a copy of the folder
        return f"the packages of the extra {extra} in the runner's pyproject.toml"
    names = [line[1] for line in lines if line[2] == extra]
    return " ".join(("pip install", *(f'"{name}"' if re.search(r"[<>=!~]", name) else name for name in names)))


def missing(error: ModuleNotFoundError) -> RunnerError | None:
    """What is said where this Python lacks packages that every run needs; None where it is another module that was not found."""
    lacks = {IMPORTED_AS.get(package, package): package for package in NEEDED}
    lacks = {module: package for module, package in lacks.items() if not _is_here(module)}
    name = str(error.name).partition(".")[0]
    if name not in lacks:
        return None
    others = [module for module in lacks if module != name]
    named = ", ".join((name, *others[:2])) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
    what = f"-e {shlex.quote(_checkout())}" if _is_checkout(PACKAGES) else " ".join(lacks.values())
    fix = f"{shlex.quote(sys.executable)} -m pip install {what}"  # another Python's `pip` may come first
    return RunnerError(Problem("python -m runner", f"this Python has no {named}, which the runner imports", fix))


def _is_here(module: str) -> bool:
    with suppress(ValueError):  # of one in sys.modules that says nothing of where it came from
        return util.find_spec(module) is not None
    return sys.modules.get(module) is not None


def _checkout() -> str:
    return "." if Path.cwd() == PACKAGES else str(PACKAGES)


def _is_checkout(folder: Path) -> bool:
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeError):
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        return bool(project.get("name") == DISTRIBUTION)
    return False
