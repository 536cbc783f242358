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


def read(path: Path, *, most: int = MOST_BYTES) -> str:
    """The text of a file. Never waits: a pipe, a socket or a device is none. Raises: OSError, ValueError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file")
        if found.st_size > most:
            raise OSError(f"{path} has {found.st_size:,} bytes, and a run writes no more than {most:,}")
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


def yaml_refusal(path: Path) -> str:
    """Why a rerun.yaml is not built of its text; "" where it may be, or its reader tells what is wrong with it.

    Nine levels of nine aliases are nine to the ninth values, in 200 bytes.
    """
    try:
        text = read(path, most=MOST_YAML_BYTES)
    except OSError as error:
        return "" if isinstance(error, FileNotFoundError) else str(error)
    except ValueError:
        return ""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.AliasEvent):
                return f"it holds aliases (*{event.anchor}), and a run writes its values out"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                return f"it is more than {MOST_DEPTH} levels deep"
    except yaml.YAMLError:
        return ""
    return ""
