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

from runner.errors import RunnerError
from runner.version import DISTRIBUTION, PACKAGES

#: packages that are imported by another name
IMPORTED_AS = {"hydra-core": "hydra", "pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
#: the dependencies in pyproject.toml: a copy of the folder has no metadata
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
    lacks = {IMPORTED_AS.get(package, package): package for package in NEEDED}
    lacks = {module: package for module, package in lacks.items() if not _is_here(module)}
    name = str(error.name).partition(".")[0]
    if name not in lacks:
        return None
    others = [module for module in lacks if module != name]
    named = ", ".join((name, *others[:2])) + (f" and {len(others) - 2} more" if len(others) > 2 else "")
    what = f"-e {shlex.quote(_checkout())}" if _is_checkout(PACKAGES) else " ".join(lacks.values())
    fix = f"run `{shlex.quote(sys.executable)} -m pip install {what}`"  # `pip` may be another Python's
    problem = f"this Python has no {named}, which the runner imports"
    return RunnerError.of("python -m runner", problem, fix, code="missing-package")


def _is_here(module: str) -> bool:
    with suppress(ValueError):  # a module in sys.modules without a spec
        return util.find_spec(module) is not None
    return sys.modules.get(module) is not None


def _checkout() -> str:
    return "." if Path.cwd() == PACKAGES else str(PACKAGES)


def _is_checkout(folder: Path) -> bool:
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeError):
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        return bool(project.get("name") == DISTRIBUTION)
    return False
