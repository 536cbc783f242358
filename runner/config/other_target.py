"""Fits a group to the arguments of its target: adds those that only the command line names, and leaves out those of
the file that a target from the command line does not take.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config import defaults, validate
from runner.config.exports import exported_name
from runner.config.identity import key_of
from runner.config.importing import loading
from runner.config.instantiate import HYDRA_KEYS, locate
from runner.config.schema import Data, Model, Optimizer
from runner.errors import RunnerError

#: what stands beside the arguments of any target
BESIDE: dict[str, type] = {"data": Data, "model": Model, "optimizer": Optimizer}

#: how Hydra says that it does not know the key of an override
REFUSED = re.compile(r"(?:Could not override '|Error merging override )([\w.]+)")


def with_arguments(load: Callable[[list[str]], DictConfig], overrides: list[str]) -> DictConfig:
    """Compose, and accept each argument that a group's target takes without a `+`, although its file does not name it.

    load: composes with a list of overrides.
    """
    words = list(overrides)
    while True:
        try:
            return load(words)
        except ConfigCompositionException as error:
            found = REFUSED.match(str(error))
            place = {word.partition("=")[0]: place for place, word in enumerate(words)}
            if found is None or found[1] not in place or not _is_taken(load, found[1], overrides):
                raise
            words[place[found[1]]] = f"++{words[place[found[1]]]}"


def _is_taken(load: Callable[[list[str]], DictConfig], key: str, overrides: Sequence[str]) -> bool:
    group, _, name = key.partition(".")
    if group not in validate.BUILT or not name:
        return False
    first = name.partition(".")[0]
    if first == "_target_" or (group in BESIDE and first in {item.name for item in fields(BESIDE[group])}):
        return True
    typed = {key_of(word): word.partition("=")[2] for word in overrides}
    target = typed.get(f"{group}._target_")
    if target is None:
        chosen = load([word for word in overrides if "." not in word.partition("=")[0]])
        target = str(validate.value(chosen, f"{group}._target_"))
    try:
        with loading():
            takes = [*inspect.signature(locate(target)).parameters]
    except (RunnerError, TypeError, ValueError):  # the check reports it
        return False
    return first in takes[group in validate.PARTIAL :]  # the first one of an optimizer's is given in code


def leave_out(cfg: DictConfig, words: Sequence[str], file_of: Callable[[str], Path | None]) -> list[str]:
    """Takes out of each group with a target from the command line what its file alone says and the target does not take.

    words: the overrides. file_of: the file of an option, GROUP/NAME.
    Returns a line for each group that lost something.
    """
    typed = {key_of(word) for word in words}
    lines = []
    for group in validate.BUILT:
        if f"{group}._target_" not in typed:
            continue
        option, target = cfg.hydra.runtime.choices.get(group), validate.value(cfg, f"{group}._target_")
        file = file_of(f"{group}/{option}") if option else None
        if file is None or not isinstance(target, str):
            continue
        own = set(HYDRA_KEYS) | {item.name for item in fields(BESIDE[group])} if group in BESIDE else set(HYDRA_KEYS)
        names = [name for name in _unchanged(cfg[group], file) if f"{group}.{name}" not in typed and name not in own]
        gone = _not_taken(target, names)
        with open_dict(cfg[group]):
            for name in gone:
                del cfg[group][name]
        if gone:
            lines.append(f"{group}._target_={target}: it takes no {', '.join(gone)}, left out of {group}={option}")
    return lines


def simplify(cfg: DictConfig) -> None:
    """Makes plain groups of structured configs, and names our parts as their package exports them, in place.

    A class's own path, runner.models.mlp.MLP, is what hydra-zen writes.
    """
    for group in validate.BUILT:
        node: Any = cfg._get_node(group, validate_access=False)
        if OmegaConf.is_dict(node) and is_dataclass(OmegaConf.get_type(node)):
            cfg[group] = OmegaConf.to_container(node, enum_to_str=True)
        _use_public_names(cfg._get_node(group, validate_access=False))


def _use_public_names(node: Any) -> None:
    if not OmegaConf.is_config(node) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    for key in list(node) if OmegaConf.is_dict(node) else range(len(node)):
        child = node._get_node(key)
        if key == "_target_" and isinstance(child._value(), str):
            node[key] = exported_name(child._value())
        else:
            _use_public_names(child)


def name_data(cfg: DictConfig, file_of: Callable[[str], Path | None]) -> None:
    """Names data after its target, where that is not the target of the chosen file: unrelated data would share its name."""
    target, option = validate.value(cfg, "data._target_"), cfg.hydra.runtime.choices.get("data")
    file = file_of(f"data/{option}") if option else None
    if file is None or not isinstance(target, str) or validate.value(cfg, "data.name") is not None:
        return
    if defaults.values_of(file).get("_target_", target) != target:
        cfg.data.name = target.rpartition(".")[2]


def _unchanged(node: DictConfig, file: Path) -> list[str]:
    values, written = OmegaConf.to_container(node), OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(values, dict) and isinstance(written, dict)  # a file that is none does not compose
    return [str(name) for name, value in written.items() if name in values and values[name] == value]


def _not_taken(target: str, names: Sequence[str]) -> list[str]:
    try:
        with loading():
            takes = inspect.signature(locate(target)).parameters
    except (RunnerError, TypeError, ValueError):
        return []
    if any(each.kind == each.VAR_KEYWORD for each in takes.values()):
        return []
    return [name for name in names if name not in takes]
