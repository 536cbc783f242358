"""Says which values make a configuration this experiment and no other, and where two of them differ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from runner.config.secrets import for_disk

#: of a value, what Hydra's grammar reads without quotes
READ = re.compile(r"[\w./:\-+%*@?|= \\$]+", re.ASCII)
#: what a resumed run may change: how long it is, what it notes, where it runs; all else would be another experiment
MAY_CHANGE = (
    "train.num_epochs",
    "train.num_steps",
    "train.max_seconds",
    "train.grace_seconds",
    "train.on_oom",
    "train.early_stopping.patience",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.hooks",
    "train.profile",
    "train.clocked_steps",
    "train.num_processes",
    "train.compile",
    "train.cuda_graph",
    "train.recompute",
    "metrics.pull_every",
    "placement.",
    "tracking.",
    "backends.",
    "data.num_workers",
    "data.residency",
    "device",
    "name",
    "plan.",
    "sweep.",
)
#: keys that earlier versions wrote to rerun.yaml
REMOVED = ("placement.map",)
#: keys that describe the data or the command, and keys without a meaning now
NOT_CHOSEN = ("defaults", "facts.", "hydra.", "plan.", "sweep.", *REMOVED)


def flat(cfg: DictConfig) -> dict[str, Any]:
    """Every value by its dotted key, its ${...} as they are written."""
    return {key: value for key, value in leaves(for_disk(cfg)) if value != {}}


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; a mapping without one is a value, too."""
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from leaves(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def chosen(cfg: DictConfig) -> dict[str, Any]:
    """What a person has chosen, by dotted key: plain values, as a checkpoint carries them."""
    return {key: value for key, value in flat(cfg).items() if not key.startswith(NOT_CHOSEN)}


def key_of(word: str) -> str:
    """The key of an override, however it is set or taken away: KEY=, +KEY=, ++KEY= and ~KEY are of the same one."""
    return word.partition("=")[0].lstrip("+~")


def quoted(text: str, mark: str = "'") -> str:
    """A text in quotes as Hydra's grammar reads it back: a backslash is one by itself, but in front of a quote."""
    escaped = re.sub(rf"(\\*){mark}", lambda found: f"{2 * found[1]}\\{mark}", text)
    return mark + re.sub(r"(\\+)$", r"\1\1", escaped) + mark


def as_read(text: str, mark: str = "'") -> str:
    """A text as it is where Hydra's grammar reads it so, else in quotes."""
    return text if READ.fullmatch(text) else quoted(text, mark)


def as_typed(key: str, value: object) -> str:
    """KEY=VALUE for a shell and Hydra's grammar, in such quotes as the value takes."""
    return shlex.quote(f"{key}={as_read(str(value), chr(34))}")


def may_change(key: str) -> bool:
    """Whether a run stays the same experiment with another value of this key."""
    return key.startswith(MAY_CHANGE)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys, in order, whose values are not the same, or that one of the two has not."""
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
