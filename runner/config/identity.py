"""Compares configurations: which values make an experiment, and how two of them differ. Also quotes overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig

from runner.config.secrets import for_disk

#: values that Hydra's grammar reads without quotes
READ = re.compile(r"[\w./:\-+%*@?|= \\$]+", re.ASCII)
#: keys that a resumed run may change; with others it would be another experiment
MAY_CHANGE = """
train.num_epochs train.num_steps train.max_seconds train.grace_seconds train.on_oom train.on_nonfinite
train.stop_when train.early_stopping.patience train.checkpoint_every train.keep_checkpoints train.hooks train.profile
train.clocked_steps train.num_processes train.compile train.cuda_graph train.recompute
metrics.pull_every placement. tracking. backends. data.num_workers data.residency device name plan. sweep.
"""
#: keys that earlier versions wrote to rerun.yaml
REMOVED = ("placement.map",)
#: arguments of parts that they wrote, with the value that changed nothing
REMOVED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "runner.data.huggingface": {"data_dir": None, "streaming": False, "num_rows": None},
    "runner.data.playground": {"features": ["x1", "x2"]},
}
#: keys that earlier versions did not have, with the value that changes nothing
ADDED = {"model.head_only": False, "model.lora": None}
#: keys that describe the data or the command, and keys without a meaning now
NOT_CHOSEN = ("defaults", "facts.", "hydra.", "plan.", "sweep.", *REMOVED)


def flat(cfg: DictConfig) -> dict[str, Any]:
    """Return every value by its dotted key, with its `${...}`."""
    return {key: value for key, value in leaves(for_disk(cfg)) if value != {}}


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key; an empty mapping is a value, too."""
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from leaves(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def chosen(cfg: DictConfig) -> dict[str, Any]:
    """Return the values of an experiment by dotted key, as a checkpoint has them."""
    return chosen_of(flat(cfg))


def chosen_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of all values that make the experiment."""
    data = {key.removeprefix("data."): value for key, value in values.items() if key.startswith("data.")}
    left_out = {f"data.{name}" for name in removed_arguments(data)}
    left_out |= {key for key, value in ADDED.items() if values.get(key) == value}
    return {key: value for key, value in values.items() if not key.startswith(NOT_CHOSEN) and key not in left_out}


def removed_arguments(node: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a part in an earlier version's rerun.yaml that it no longer takes, and that change nothing."""
    values = REMOVED_ARGUMENTS.get(str(node.get("_target_")), {})
    return [name for name, value in values.items() if node.get(name, ...) == value]


def key_of(override: str) -> str:
    """Return the key of an override: the same for KEY=, +KEY=, ++KEY= and ~KEY."""
    return override.partition("=")[0].lstrip("+~")


def quoted(text: str, mark: str = "'") -> str:
    """Return a text in quotes for Hydra's grammar, where a backslash escapes only a quote."""
    escaped = re.sub(rf"(\\*){mark}", lambda match: f"{2 * match[1]}\\{mark}", text)
    return mark + re.sub(r"(\\+)$", r"\1\1", escaped) + mark


def as_read(text: str, mark: str = "'") -> str:
    """Return a text for Hydra's grammar, in quotes where it needs them."""
    return text if READ.fullmatch(text) else quoted(text, mark)


def as_text(value: Any) -> str:
    """Return a value as it is typed: [1,2], null or true."""
    if isinstance(value, list | tuple | ListConfig):
        return f"[{','.join(map(as_text, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def as_typed(key: str, value: object) -> str:
    """Return KEY=VALUE for a shell and Hydra's grammar, quoted."""
    return shlex.quote(f"{key}={as_read(str(value), chr(34))}")


def may_change(key: str) -> bool:
    """Return whether a run stays the same experiment with another value of this key."""
    return key.startswith(tuple(MAY_CHANGE.split()))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys, sorted, whose values differ or that only one of the two has."""
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
