"""Fits the nodes that have a `_target_` to its arguments, and fills in the facts of the data.

Where the command line chooses another `_target_`, values of the option's file that this target does not take are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from runner.config import validate
from runner.config.allowed import exported_name
from runner.config.identity import key_of, removed_arguments
from runner.config.importing import loading
from runner.config.instantiate import HYDRA_KEYS, arguments
from runner.config.schema import SHARED, keys
from runner.errors import RunnerError

#: settings of every model, optimizer and schedule, as conf/base.yaml has them; a target with an argument of the same name gets
#: the argument where its value is another one
USUAL: dict[str, dict[str, Any]] = {
    "model": {"weights": None, "strict": True, "freeze": [], "head_only": False, "lora": None},
    "optimizer": {"groups": [], "no_decay": None, "turns": None},
    "scheduler": {"interval": None},
}
FileOf = Callable[[str], Path | None]  # of an option, GROUP/NAME


def _content(file: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file))  # type: ignore[return-value]


def leave_out(cfg: DictConfig, overrides: Sequence[str], file_of: FileOf) -> list[str]:
    """Remove values of an option's file that a target of the command line does not take.

    Returns a line for each option that the command line chooses, too.
    """
    typed = {key_of(override) for override in overrides}
    lines = []
    for group in validate.BUILT:
        option, target = cfg.hydra.runtime.choices.get(group), validate.value(cfg, f"{group}._target_")
        file = file_of(f"{group}/{option}") if option else None
        if f"{group}._target_" not in typed or file is None or not isinstance(target, str):
            continue
        with loading():
            takes = arguments(target)
        if takes is None or any(each.kind == each.VAR_KEYWORD for each in takes.values()):
            continue
        shared = keys(SHARED[group]) if group in SHARED else {}
        values, kept = OmegaConf.to_container(cfg[group]), {*HYDRA_KEYS, *takes, *shared}
        unused = [
            name
            for name, value in _content(file).items()
            if name not in kept and f"{group}.{name}" not in typed and values.get(name, ...) == value  # type: ignore[union-attr]
        ]
        with open_dict(cfg[group]):
            for name in unused:
                del cfg[group][name]
        if unused and group in typed:
            lines.append(f"{group}._target_={target}: it takes no {', '.join(unused)}, left out of {group}={option}")
    return lines


def simplify(cfg: DictConfig) -> None:
    """Make plain groups of structured configs, and give our parts their exported names: hydra-zen writes others."""
    for group in validate.BUILT:
        node: Any = cfg._get_node(group, validate_access=False)
        if OmegaConf.is_dict(node) and is_dataclass(OmegaConf.get_type(node)):
            cfg[group] = OmegaConf.to_container(node, enum_to_str=True)
        _use_exported_names(node := cfg._get_node(group, validate_access=False))
        if OmegaConf.is_dict(node) and not (node._is_none() or node._is_interpolation() or node._is_missing()):
            with open_dict(node):
                for name in removed_arguments(dict(node.items_ex(resolve=False))):
                    del node[name]


def _use_exported_names(node: Any) -> None:
    if not OmegaConf.is_config(node) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    for key in list(node) if OmegaConf.is_dict(node) else range(len(node)):
        child = node._get_node(key)
        if key == "_target_" and isinstance(child._value(), str):
            node[key] = exported_name(child._value())
        else:
            _use_exported_names(child)


def name_data(cfg: DictConfig, file_of: FileOf) -> None:
    """Name data without a name after its option, or after a target that is not that of the option's file."""
    target, option = validate.value(cfg, "data._target_"), cfg.hydra.runtime.choices.get("data")
    if not OmegaConf.is_dict(validate.value(cfg, "data")) or cfg.data.get("name", ...) is not None or not option:
        return
    file = file_of(f"data/{option}")
    is_own = file is not None and isinstance(target, str) and _content(file).get("_target_", target) != target
    cfg.data.name = target.rpartition(".")[2] if is_own else option


def resolved(cfg: DictConfig, key: str) -> dict[str, Any]:
    """Return a node with its `${...}` resolved.

    Raises:
        RunnerError: The node needs a fact that this data does not have.
    """
    try:
        return validate.target_node(cfg, key, resolve=True)
    except OmegaConfBaseException as error:
        known = {str(name): cfg.facts[name] for name in cfg.facts if not OmegaConf.is_missing(cfg.facts, name)}
        facts = {name: value for name, value in known.items() if value is not None}
        match = re.search(r"facts\.(\w+)", str(error))
        name = match[1] if match else "such fact"
        problem = f"this data has no `{name}`; it has {', '.join(f'{fact}={value}' for fact, value in facts.items())}"
        needing = [word for word, text in validate.target_node(cfg, key).items() if text == f"${{facts.{name}}}"]
        fix = f"set `{key}.{needing[0] if needing else 'KEY'}=...` to the value itself"
        if key == "model" and facts.get("vocab_size"):
            fix = "use a model of tokens: `model=gpt`, `model=transformer`, `model=gru` or `model=lstm`"
        source = f"{key}={cfg[key].get('_target_')}"
        raise RunnerError.of(source, problem, fix, code="missing-value") from None


def split_settings(node: dict[str, Any], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a node as its target takes it, and the settings that every one of its kind has."""
    usual = USUAL.get(key, {})
    taken = set(usual) & set(arguments(node.get("_target_")) or ()) if usual else set()
    own = {name: value for name, value in node.items() if name not in usual or (name in taken and value != usual[name])}
    return own, {name: node.get(name, value) for name, value in usual.items() if name not in taken}


def fill_facts(cfg: DictConfig, facts: dict[str, Any]) -> None:
    """Set the facts that the user has not set."""
    for key in cfg.facts:
        if OmegaConf.is_missing(cfg.facts, key) and key in facts:
            cfg.facts[key] = facts[key]


def leave_out_unknown_facts(cfg: DictConfig, key: str) -> None:
    """Remove the arguments that refer to facts that this data does not have: a task has defaults for them."""
    for name in list(cfg[key]):
        try:
            cfg[key][name]
        except InterpolationToMissingValueError:
            with open_dict(cfg[key]):
                del cfg[key][name]  # pop() would resolve it first
