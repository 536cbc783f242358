"""Reads a file of a run's folder, from anywhere, if it is one that a run may have written; writes one, whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 64 * 2**20  # of JSON: a model.json with 100,000 categories has a few MB
MOST_YAML_BYTES = 2**20  # a rerun.yaml has a few thousand
MOST_DEPTH = 100
MAX_ALIASED_VALUES = 10_000  # of a file in conf/


def read(path: Path, *, most: int = MOST_BYTES) -> str:
    """The text of a file. Never waits: a pipe, a socket or a device is none. Raises: OSError, ValueError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file")
        if found.st_size > most:
            raise OSError(f"{path} has {found.st_size:,} bytes, and no more than {most:,} are read")
        return file.read(most).decode("utf-8")


def read_json(path: Path) -> Any:
    """What a file of JSON holds. Raises: OSError, ValueError."""
    try:
        return json.loads(read(path))
    except RecursionError:
        raise ValueError(f"{path} is too deep") from None


def write_whole(path: Path, text: str) -> None:
    """A reader meets the old file or the new one, also where the disk is full. Makes the folder. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def yaml_refusal(path: Path, *, max_values: int = 0) -> str:
    """Explains why a YAML file is not read; "" where it can be, or where its reader reports the error.

    Nine levels of nine aliases each are 9**9 values, in 200 bytes.

    Args:
        path: The file.
        max_values: How many values its aliases may write out. 0: no aliases, as a run writes none.
    """
    try:
        text = read(path, most=MOST_BYTES if max_values else MOST_YAML_BYTES)
    except OSError as error:
        return "" if isinstance(error, FileNotFoundError) else str(error)
    except ValueError:
        return ""
    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor and number of values
    last_alias = ""
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, 0))
            elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
                size = 1
                if isinstance(event, yaml.CollectionEndEvent):
                    anchor, size = open_nodes.pop()
                    sizes[anchor] = size
                elif isinstance(event, yaml.AliasEvent):
                    if not max_values:
                        return f"it holds aliases (*{event.anchor}), and a run writes its values out"
                    last_alias = event.anchor
                    size = sizes.get(last_alias, max_values + 1)  # one that is not complete contains itself
                else:
                    sizes[event.anchor] = size
                open_nodes[-1] = open_nodes[-1][0], open_nodes[-1][1] + size
            if last_alias and open_nodes[-1][1] > max_values:
                return f"its aliases (*{last_alias}) write out more than {max_values:,} values"
            if len(open_nodes) > MOST_DEPTH + 1:
                return f"it is more than {MOST_DEPTH} levels deep"
    except yaml.YAMLError:
        return ""
    return ""
