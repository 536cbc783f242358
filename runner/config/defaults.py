"""Says what of a run's values the built-in conf/ would not say by itself, as one would type it: model=mlp. For experiment/run_record.py."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from runner.config import run_files
from runner.config.identity import leaves
from runner.version import HERE

#: a wheel carries conf/ as runner/conf; in a checkout and an editable install it lies beside runner/
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"

#: what a run is called and where it is kept makes it no other run
NOT_OF_THE_RUN = ("name", "tracking.")
#: told of every model, also where they are as usual: who compares models asks for them first
ALWAYS = ("optimizer.lr", "train.batch_size", "train.num_epochs", "train.num_steps", "seed")


def changed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The file that answers where it is another one (`model`: mlp), and the values that are not as the files have them.

    chosen: as config.identity.chosen() has it. About 5 ms in a process's first call, then 0.2 ms (2026-11).
    Where no file has the section's `_target_`, that is the answer, and all other values of the section count.
    """
    usual = dict(_base())
    answers: dict[str, Any] = {}
    for group, choice in _choices().items():
        answer, values = _answer(group, choice, chosen)
        usual |= values
        if answer != choice:
            answers[group] = answer
            usual[f"{group}._target_"] = chosen.get(f"{group}._target_")
    # a null is an answer, too
    differing = {key: value for key, value in chosen.items() if key not in usual or usual[key] != value}
    return answers | {key: value for key, value in differing.items() if not key.startswith(NOT_OF_THE_RUN)}


def main(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The few that tell a model from others: which model, data and optimizer, its rate and length, and what was changed.

    What follows from the data, ${facts...}, is left out.
    """
    groups = {group: _answer(group, _choices()[group], chosen)[0] for group in ("model", "data", "optimizer")}
    always = {key: chosen[key] for key in ALWAYS if chosen.get(key) is not None}
    found = changed(chosen) | groups | always
    return {key: value for key, value in found.items() if "${" not in str(value)}


def answers(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The file that answers each group's question, or the target that no file has."""
    return {group: _answer(group, choice, chosen)[0] for group, choice in _choices().items()}


def values_of(file: Path) -> dict[str, Any]:
    """Every value of a configuration that a run has written, by its dotted key."""
    return _flat(_read(file), "")


def in_words(values: Mapping[str, Any]) -> str:
    """model=mlp model.hidden_sizes=[64,64]."""
    return " ".join(f"{key}={in_word(value)}" for key, value in values.items())


def in_word(value: Any) -> str:
    """[64,64], null."""
    return str(value).replace(", ", ",") if value is not None else "null"


def _answer(group: str, choice: str, chosen: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The file of conf/ that the section comes from, by its target and then by its values, and the values in that file.

    Where no built-in file has the target, the files in the conf/ of the current directory are searched.
    """
    target = chosen.get(f"{group}._target_")
    names = [choice]
    if _file(CONF / group / f"{choice}.yaml", group).get(f"{group}._target_") != target:
        names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    found = {name: _file(CONF / group / f"{name}.yaml", group) | _named(group, name) for name in names}
    alike = {name: values for name, values in found.items() if values.get(f"{group}._target_") == target}
    if not alike:
        own = [path for path in sorted(Path("conf", group).glob("*.yaml")) if not run_files.yaml_refusal(path)]
        found = {path.stem: _own_file(path, group) | _named(group, path.stem) for path in own}
        alike = {name: values for name, values in found.items() if values.get(f"{group}._target_") == target}
    if not alike:
        return str(target), {}
    best = min(alike, key=lambda name: sum(chosen.get(key) != value for key, value in alike[name].items()))
    return best, alike[best]


def _named(group: str, choice: str) -> dict[str, Any]:
    return {"data.name": choice} if group == "data" else {}


@functools.cache
def _choices() -> dict[str, str]:
    defaults = _read(CONF / "config.yaml")["defaults"]
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    return {group: choice for group, choice in pairs if choice is not None and not group.startswith("override ")}


@functools.cache
def _base() -> dict[str, Any]:
    return _flat({key: node for key, node in _read(CONF / "base.yaml").items() if key not in ("defaults", "hydra")}, "")


@functools.cache
def _file(path: Path, group: str) -> dict[str, Any]:
    return _flat({key: node for key, node in _read(path).items() if key != "defaults"}, group)


def _own_file(path: Path, group: str) -> dict[str, Any]:
    try:
        return _flat({key: node for key, node in _read(path).items() if key != "defaults"}, group)
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}


def _read(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf's own takes 70 ms for all of it
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader) or {}


def _flat(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {path: value for path, value in leaves(node, key) if value != {}}
