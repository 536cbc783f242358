"""Compares a run's values with the built-in conf/, and writes the difference as it is typed: model=mlp."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from runner.config import run_files
from runner.config.identity import as_text, leaves
from runner.version import CONF as CONF

#: names and places, which make no other run
IGNORED_KEYS = ("name", "tracking.")
#: shown of every model, also with their defaults
ALWAYS = ("optimizer.lr", "train.batch_size", "train.num_epochs", "train.num_steps", "seed")


def changed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not the default ones (`model`: mlp), and the values that differ from the files.

    Where no file has a group's `_target_`, the target is the option, and all other values of the group count.

    Args:
        chosen: The values of a run, from config.identity.chosen().
    """
    usual = dict(_values(CONF / "base.yaml", ""))
    answers: dict[str, Any] = {}
    for group, choice in _choices().items():
        answer, values = _option(group, choice, chosen)
        usual |= values
        if answer != choice:
            answers[group] = answer
            usual[f"{group}._target_"] = chosen.get(f"{group}._target_")
    differing = {key: value for key, value in chosen.items() if key not in usual or usual[key] != value}
    return answers | {key: value for key, value in differing.items() if not key.startswith(IGNORED_KEYS)}


def main(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the few values that distinguish a model: its options, rate, length, and every change; no `${facts...}`."""
    groups = {group: _option(group, _choices()[group], chosen)[0] for group in ("model", "data", "optimizer")}
    always = {key: chosen[key] for key in ALWAYS if chosen.get(key) is not None}
    values = changed(chosen) | groups | always
    return {key: value for key, value in values.items() if "${" not in str(value)}


def answers(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of each group, or the target that no file has."""
    return {group: _option(group, choice, chosen)[0] for group, choice in _choices().items()}


def values_of(file: Path) -> dict[str, Any]:
    """Return every value of a configuration that a run has written, by its dotted key."""
    return _flat(_read(file), "")


def in_words(values: Mapping[str, Any]) -> str:
    """Return values as overrides: model=mlp model.hidden_sizes=[64,64]."""
    return " ".join(f"{key}={as_text(value)}" for key, value in values.items())


def _option(group: str, choice: str, chosen: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The option of a group and the values in its file: `choice`, another built-in file, or one in the current conf/."""
    target = chosen.get(f"{group}._target_")
    default, own = CONF / group / f"{choice}.yaml", sorted(Path("conf", group).glob("*.yaml"))
    for files in ([default], sorted((CONF / group).glob("*.yaml")), own):
        fitting = {}
        for file in files:
            values = dict(_values(file, group)) if files is not own else _own_values(file, group)
            if values.get(f"{group}._target_") == target:
                fitting[file.stem] = values | ({"data.name": file.stem} if group == "data" else {})
        if fitting:
            best = min(fitting, key=lambda name: sum(chosen.get(key) != value for key, value in fitting[name].items()))
            return best, fitting[best]
    return str(target), {}


@functools.cache
def _choices() -> dict[str, str]:
    defaults = _read(CONF / "config.yaml")["defaults"]
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    return {group: choice for group, choice in pairs if choice is not None and not group.startswith("override ")}


@functools.cache
def _values(path: Path, group: str) -> dict[str, Any]:
    hidden = ("defaults",) if group else ("defaults", "hydra")
    return _flat({key: node for key, node in _read(path).items() if key not in hidden}, group)


def _own_values(path: Path, group: str) -> dict[str, Any]:
    try:
        return {} if run_files.yaml_refusal(path) else _values.__wrapped__(path, group)
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}


def _read(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf's own takes 70 ms for all files
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader) or {}


def _flat(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {path: value for path, value in leaves(node, key) if value != {}}
