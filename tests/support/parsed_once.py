"""Hydra's configuration files, and what stands between ${ and }: each text is parsed once in a process.

A quarter of a composition each.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import omegaconf.base
from omegaconf import OmegaConf

LOAD = OmegaConf.load
_parsed: dict[tuple[str, str], Any] = {}


def parse_once() -> None:
    """From now on, in this process and in its forks, of what is given as an open file; that is how Hydra does it."""
    OmegaConf.load = staticmethod(_load)
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)  # a tree that is only walked


def _load(file: Any) -> Any:
    if not hasattr(file, "read"):
        return LOAD(file)
    key = (file.name, file.read())
    if key not in _parsed:
        file.seek(0)
        _parsed[key] = LOAD(file)
    return copy.deepcopy(_parsed[key])
