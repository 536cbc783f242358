"""The summary of a run: how it ended, in figures. Written to summary.json whole or not at all, and read again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig

from runner.config import run_files

FILE = "summary.json"


@dataclass(frozen=True)
class Summary:
    """A run's result. The fields are the keys of summary.json; defaults are those of a run that never began."""

    status: str = ""  # finished, pruned, killed, failed or skipped; "" without a summary
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

    @property
    def has_ended(self) -> bool:
        """Whether the training has ended: it was neither killed nor skipped."""
        return self.status in ("finished", "pruned", "failed")

    def is_over(self, changed: Sequence[str] = ()) -> bool:
        """Return whether a run is complete and the changed arguments do not make it longer."""
        is_at_end = self.status in ("finished", "pruned") and self.ending != "max_seconds"
        return is_at_end and not any(word.lstrip("+").startswith("train.") for word in changed)

    @classmethod
    def read(cls, directory: Path) -> Summary:
        """Return a directory's summary, an empty one without a readable file. Values of a wrong type are left out."""
        try:
            values = run_files.read_json(directory / FILE)
        except (OSError, ValueError):
            return cls()
        hints = get_type_hints(cls).items() if isinstance(values, dict) else ()
        return cls(**{name: values[name] for name, kind in hints if name in values and _has_type(values[name], kind)})

    def write(self, directory: Path) -> None:
        """Raise an OSError if the disk is full; the file is the old one then."""
        run_files.write_whole(directory / FILE, json.dumps(vars(self), indent=2) + "\n")

    @classmethod
    def note(cls, directory: Path, **known: Any) -> None:
        """Add what the run's process could not know: where MLflow has it, and how much of it."""
        before = cls.read(directory)
        if before.status and (after := replace(before, **known)) != before:
            after.write(directory)


def _has_type(value: Any, kind: Any) -> bool:
    kinds = [get_origin(each) or each for each in (get_args(kind) if isinstance(kind, UnionType) else (kind,))]
    return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))


def length_key(cfg: DictConfig) -> str:
    """Return the key that decides how long a run is."""
    return "train.num_epochs" if cfg.train.num_steps is None else "train.num_steps"
