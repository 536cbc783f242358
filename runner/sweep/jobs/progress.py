"""Follows in a job's journal how far it has got, and its last values. For progress_table.py, in the sweep's process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from runner.tracking.journal_records import FILE, Points, scan


class Watch:
    """Reads only what was added since the last look."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._offset = 0
        self.step = 0
        self.num_steps = 0  # 0: not known yet
        self.values: dict[str, float] = {}

    def look(self) -> None:
        """Takes in what has been written; milliseconds."""
        with suppress(FileNotFoundError, ValueError):  # not there yet, or begun anew
            for record in scan(self._path, self._offset):
                self._offset = record.end
                if isinstance(record.data, Points):
                    if record.data.names[0].startswith("train/"):
                        self.step = max(self.step, int(record.data.steps[-1]))
                    self.values.update(zip(record.data.names, map(float, record.data.values[-1]), strict=True))
                elif record.kind == "start":
                    self.num_steps = int(record.data["params"].get("facts.num_steps", 0))
