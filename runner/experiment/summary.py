"""Writes a run's summary.json, whole or not at all, and reads it: for sweeps and commands that ask how a run ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.config import run_files

FILE = "summary.json"


def read_summary(folder: Path) -> dict[str, Any]:
    """What a run left; {} when it left nothing that can be read."""
    try:
        summary = run_files.read_json(folder / FILE)
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def note_tracker(folder: Path, **known: Any) -> None:
    """Writes into a run's summary what its own process could not know: where MLflow has it, and how much of it."""
    summary = read_summary(folder)
    if summary and any(summary.get(name) != value for name, value in known.items()):
        write_summary(folder, summary | known)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Raises: OSError where the disk is full; the old one is there then."""
    run_files.write_whole(folder / FILE, json.dumps(summary, indent=2) + "\n")


def is_over(summary: Mapping[str, Any], changed: Sequence[str] = ()) -> bool:
    """Whether there is nothing left to do: it has come to its end, and no word of `changed` asks for more."""
    is_at_end = summary.get("status") in ("finished", "pruned") and summary.get("ending") != "max_seconds"
    return is_at_end and not any(word.lstrip("+").startswith("train.") for word in changed)


def length_key(cfg: DictConfig) -> str:
    """The key that says how long a run is: of two that are given, its steps."""
    return "train.num_epochs" if cfg.train.num_steps is None else "train.num_steps"
