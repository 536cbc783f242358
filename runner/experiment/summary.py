"""The summary of a run: how it ended, in figures. Written to summary.json whole or not at all, and read again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.config import run_files

FILE = "summary.json"


@dataclass(frozen=True)
class Summary:
    """A run's result. The fields are the keys of summary.json; defaults are those of a run that never began."""

    status: str  # finished, pruned, killed, failed or skipped
    error: str | None = None
    run_id: str | None = None
    tracking_uri: str | None = None  # None: not tracked
    device: str | None = None
    device_reason: str | None = None
    num_epochs: int = 0
    num_steps: int = 0
    num_samples: int = 0
    num_parameters: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last value of each
    best: Mapping[str, Any] = field(default_factory=dict)  # metric, value, step and mode
    ending: str = ""  # what ended the training
    seconds: Mapping[str, float] = field(default_factory=dict)  # start, setup, train, evaluate, finish and total
    time: Mapping[str, float] = field(default_factory=dict)  # seconds by cause; they add up to the total
    step: Mapping[str, Any] | None = None  # what one step takes
    advice: Mapping[str, Any] | None = None  # the change that would save most time
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    peak_memory_bytes: int | None = None
    peak_memory_of: str = ""
    hints: Sequence[str] = ()
    host_reads: Mapping[str, int] = field(default_factory=dict)  # pulls, points and unexpected
    tracker: Mapping[str, int] = field(default_factory=dict)  # points_written and points_pending
    versions: Mapping[str, str] = field(default_factory=dict)
    num_processes: int = 1
    exit_code: int = 0  # of a signal; see `code`

    @property
    def code(self) -> int:
        """The exit code of a command that made only this run."""
        return int(self.exit_code or self.status == "failed")

    def write(self, directory: Path) -> None:
        """Raise an OSError if the disk is full; the file is the old one then."""
        write_summary(directory, vars(self))


def read_summary(folder: Path) -> dict[str, Any]:
    """Return what is in a directory's summary.json, or {} without a readable one."""
    try:
        summary = run_files.read_json(folder / FILE)
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def note_tracker(folder: Path, **known: Any) -> None:
    """Add what the run's process could not know: where MLflow has it, and how much of it."""
    summary = read_summary(folder)
    if summary and any(summary.get(name) != value for name, value in known.items()):
        write_summary(folder, summary | known)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Raise an OSError if the disk is full; the file is the old one then."""
    run_files.write_whole(folder / FILE, json.dumps(summary, indent=2) + "\n")


def is_over(summary: Mapping[str, Any], changed: Sequence[str] = ()) -> bool:
    """Return whether a run is complete and the changed arguments do not make it longer."""
    is_at_end = summary.get("status") in ("finished", "pruned") and summary.get("ending") != "max_seconds"
    return is_at_end and not any(word.lstrip("+").startswith("train.") for word in changed)


def length_key(cfg: DictConfig) -> str:
    """Return the key that decides how long a run is."""
    return "train.num_epochs" if cfg.train.num_steps is None else "train.num_steps"
