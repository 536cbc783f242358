"""A run's summary goes in; its folder's summary.json comes out, whole or not at all, and back again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import texts

FILE = "summary.json"


def read_summary(folder: Path) -> dict[str, Any]:
    """What a run left; {} when it left nothing that can be read."""
    try:
        summary = texts.read_json(folder / FILE)
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """A reader meets the old file or the new one, also where the disk is full. Raises: OSError when it is."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / "summary.writing"
    try:
        beside.write_text(json.dumps(summary, indent=2) + "\n")
        beside.replace(folder / FILE)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
