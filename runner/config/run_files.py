"""Reads a file of a run directory if a run may have written it; writes one completely or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 64 * 2**20  # a model.json with 100,000 categories has a few MB
MAX_YAML_BYTES = 2**20  # a rerun.yaml has a few thousand
MAX_DEPTH = 100
MAX_ALIASED_VALUES = 10_000  # of a file in conf/


def read(path: Path, *, most: int = MAX_BYTES) -> str:
    """Return the text of a file. Never waits for a pipe, a socket or a device. Raises: OSError, ValueError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a file")
        if status.st_size > most:
            raise OSError(f"{path} has {status.st_size:,} bytes, and no more than {most:,} are read")
        return file.read(most).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises: OSError, ValueError."""
    try:
        return json.loads(read(path))
    except RecursionError:
        raise ValueError(f"{path} is too deep") from None


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, also where the disk gets full; makes the directory. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".writing")
    try:
        new.write_text(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def yaml_refusal(path: Path, *, max_values: int = 0) -> str:
    """Explains why a YAML file is not read; "" where it can be, or where its reader reports the error.

    Nine levels of nine aliases each are 9**9 values, in 200 bytes.

    Args:
        path: The file.
        max_values: How many values its aliases may write out. 0: no aliases, as a run writes none.
    """
    try:
        text = read(path, most=MAX_BYTES if max_values else MAX_YAML_BYTES)
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
                        return f"it has aliases (*{event.anchor}), and a run writes its values out"
                    last_alias = event.anchor
                    size = sizes.get(last_alias, max_values + 1)  # one that is not complete contains itself
                else:
                    sizes[event.anchor] = size
                open_nodes[-1] = open_nodes[-1][0], open_nodes[-1][1] + size
            if last_alias and open_nodes[-1][1] > max_values:
                return f"its aliases (*{last_alias}) write out more than {max_values:,} values"
            if len(open_nodes) > MAX_DEPTH + 1:
                return f"it is more than {MAX_DEPTH} levels deep"
    except yaml.YAMLError:
        return ""
    return ""
