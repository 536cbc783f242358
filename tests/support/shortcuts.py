"""Make tests faster: compose equal choices of options once per process, and save plots as one white dot.

A composition takes 0.2 s of CPU time, and the tests compose thousands. Two thirds of it depend only on the choices and the files.

A plot is still built, and its file written. A test that reads the plot's pixels uses the fixture `ink`.
"""

from __future__ import annotations

import base64
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import omegaconf.base
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from runner.config.defaults import CONF
from runner.experiment.plots import style

LOAD, SAVE = OmegaConf.load, style.save
DEFAULTS, COMPOSE = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
MAX_KEPT = 200
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
_parsed: dict[tuple[str, str], bytes] = {}
_kept: dict[tuple[Any, ...], Any] = {}


def compose_once() -> None:
    """Parse each file and each interpolation once, in this process and its forks, and compose equal choices once."""
    OmegaConf.load = staticmethod(_load)
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)  # the cached tree is not modified
    config_loader_impl.create_defaults_list = _defaults
    ConfigLoaderImpl._compose_config_from_defaults_list = _compose


def _defaults(repo: Any, config_name: Any, overrides_list: list[Any], **settings: Any) -> Any:
    """Replace Hydra's function: the list depends on the choices, not on the values of keys, which Hydra sets later."""
    values = [each for each in overrides_list if not each.is_sweep_override() and _is_value(each, repo)]
    choices = [each for each in overrides_list if each not in values]
    names = tuple(each.input_line for each in choices)
    found = _once(
        lambda: DEFAULTS(repo=repo, config_name=config_name, overrides_list=choices, **settings),
        (config_name, names, tuple(settings.items())),
        repo,
    )
    return replace(found, config_overrides=values)


def _is_value(override: Any, repo: Any) -> bool:
    return isinstance(override.value(), dict) or not repo.group_exists(override.key_or_group)


def _compose(loader: Any, defaults: list[Any], repo: Any) -> Any:
    """Replace Hydra's function, which merges the files of a list of defaults."""
    return pickle.loads(_once(lambda: pickle.dumps(COMPOSE(loader, defaults, repo)), (repr(defaults),), repo))


def _once(make: Callable[[], Any], key: tuple[Any, ...], repo: Any) -> Any:
    """Make something once for a key and the content of the user's files."""
    folders = [Path(source.path) for source in repo.get_sources() if source.scheme() == "file"]
    own = [folder for folder in folders if folder != CONF]
    if any(folder.name != "conf" for folder in own):  # a run's directory, or any other
        return make()
    files = [file for folder in own for file in folder.rglob("*.yaml") if file.is_file()]
    if any(
        re.search(r"override .*\$\{", file.read_text(errors="replace")) for file in files
    ):  # chosen by the environment
        return make()
    key = (*key, *folders, *((file, file.read_bytes()) for file in sorted(files)))
    if key not in _kept:
        if len(_kept) >= MAX_KEPT:
            _kept.clear()
        _kept[key] = make()
    return _kept[key]


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
