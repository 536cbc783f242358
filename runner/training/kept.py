"""A run's kept checkpoints, `checkpoints/step-N.pt`: kept.json beside them says what each has reached; those of no more use are deleted.

Called by the checkpoint writer, in the background thread of the process that writes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.run_files import write_whole

FILE = "kept.json"
EVERY = "every_epoch"


@dataclass(frozen=True)
class Keeping:
    """Which of the measured steps are kept: all of them, the last `most`, or the best `most` by a metric."""

    most: int | None  # None: all
    metric: str | None = None  # None: the last ones
    mode: str = "min"

    @classmethod
    def of(cls, words: str, *, metric: str, mode: str) -> Keeping:
        """words: train.keep_checkpoints."""
        kind, _, most = words.partition(":")
        return cls(None if words == EVERY else int(most), metric if kind == "best" else None, mode)


def file_of(step: int) -> str:
    return f"step-{step}.pt"


def note(folder: Path, entry: dict[str, Any]) -> None:
    """Writes down a checkpoint before it is there: one that a kill leaves out is taken again when the run goes on.

    entry: `step`, `epoch`, `metrics`.
    """
    others = [other for other in read(folder) if other["step"] != entry["step"]]
    _write(folder, [*others, {"file": file_of(entry["step"]), **entry}])


def prune(folder: Path, keeping: Keeping) -> None:
    """Delete the checkpoints that `keeping` doesn't keep, also files that kept.json doesn't list."""
    listed = {entry["step"]: entry for entry in read(folder)}
    files = {int(path.stem[5:]) for path in folder.glob("step-*.pt") if path.stem[5:].isdecimal()}
    unlisted = [{"file": file_of(step), "step": step, "metrics": {}} for step in files - listed.keys()]
    entries = sorted([*listed.values(), *unlisted], key=lambda entry: _worth(entry, keeping), reverse=True)
    kept = entries[: keeping.most]
    for entry in entries[len(kept) :]:
        (folder / entry["file"]).unlink(missing_ok=True)
    if {entry["step"] for entry in kept} != listed.keys():
        _write(folder, kept)


def read(folder: Path) -> list[dict[str, Any]]:
    """What is kept, by step; [] where nothing is, or the file is not what was written."""
    try:
        found = json.loads((folder / FILE).read_text())
        return [{**entry, "file": file_of(int(entry["step"]))} for entry in found]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _worth(entry: dict[str, Any], keeping: Keeping) -> tuple[float, int]:
    if keeping.metric is None:
        return 0.0, entry["step"]
    value = float(entry["metrics"].get(keeping.metric, math.nan))
    if math.isnan(value):
        return -math.inf, entry["step"]
    return (-value if keeping.mode == "min" else value), entry["step"]


def _write(folder: Path, entries: list[dict[str, Any]]) -> None:
    write_whole(folder / FILE, json.dumps(sorted(entries, key=lambda entry: entry["step"]), indent=1) + "\n")
