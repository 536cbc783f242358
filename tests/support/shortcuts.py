"""Make tests faster: parse Hydra's files once per process, and save plots as one white dot.

A plot is still built, and its file written. A test that reads the plot's pixels uses the fixture `ink`.
"""

from __future__ import annotations

import base64
import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import omegaconf.base
from omegaconf import OmegaConf

from runner.experiment.plots import style

LOAD, SAVE = OmegaConf.load, style.save
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
_parsed: dict[tuple[str, str], bytes] = {}


def parse_once() -> None:
    """Parse each file and each interpolation once, in this process and its forks. Hydra passes open files."""
    OmegaConf.load = staticmethod(_load)
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)  # the cached tree is not modified


def _load(file: Any) -> Any:
    if not hasattr(file, "read"):
        return LOAD(file)
    key = (file.name, file.read())
    if key not in _parsed:
        file.seek(0)
        _parsed[key] = pickle.dumps(LOAD(file))  # a seventh of the time of copy.deepcopy()
    return pickle.loads(_parsed[key])


def leave_undrawn() -> None:
    style.save = _dot


@contextmanager
def rendered() -> Iterator[None]:
    style.save = SAVE
    try:
        yield
    finally:
        leave_undrawn()


def _dot(figure: Any, path: Path) -> Path:
    path.write_bytes(base64.b64decode(DOT))
    return path
