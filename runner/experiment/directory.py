"""A run's directory and what is in it, as every command reads it. The files have the same names in every version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.experiment.summary import Summary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runner.tracking.ack import Ack

# the modules of tracking import numpy, which --help does not wait for
RERUN, ENVIRONMENT, DIFF = "rerun.yaml", "environment.txt", "git.diff"
CHECKPOINTS = "checkpoints"
BEST, LAST = f"{CHECKPOINTS}/best.pt", f"{CHECKPOINTS}/last.pt"
EXAMPLE = "journal/example.pt"  # a few rows of the model's inputs


@dataclass(frozen=True)
class Run:
    """A run that has begun, by its directory."""

    folder: Path
    weights: str = BEST  # the file of those that a command uses

    @property
    def summary(self) -> Summary:
        """How it ended; an empty one without a summary."""
        return Summary.read(self.folder)

    @property
    def ack(self) -> Ack:
        """How much of it MLflow has."""
        from runner.tracking.ack import read_ack

        return read_ack(self.folder)

    @property
    def is_running(self) -> bool:
        """Whether a process writes to it."""
        from runner.tracking.journal import is_being_written

        return is_being_written(self.folder)

    @property
    def status(self) -> str:
        """As in the summary; running, or killed without a summary."""
        return "running" if self.is_running else self.summary.status or "killed"

    @property
    def is_resumable(self) -> bool:
        """Whether it has a checkpoint to continue from."""
        return any((self.folder / CHECKPOINTS).glob("last*.pt"))

    @property
    def has_begun(self) -> bool:
        from runner.tracking.journal_records import FILE, scan

        journal = self.folder / FILE
        return self.is_resumable or (journal.is_file() and any(record.kind == "start" for record in scan(journal)))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of a kind, in order."""
        from runner.tracking.journal_reader import read_events

        return [event for event in read_events(self.folder) if event["kind"] == kind]

    def points(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return the steps (n,) and values (n,) of each metric, in the order of writing."""
        from runner.tracking.journal_reader import read_series

        return {name: (steps, values) for name, (steps, _, values) in read_series(self.folder).items()}

    def has_other_data(self, fingerprint: str) -> bool:
        """Return whether it trained on data with another fingerprint, as far as it is known."""
        digests = [event["digest"] for event in self.events("dataset")]
        return bool(digests) and not fingerprint.startswith(digests[-1])

    def text(self, name: str) -> str | None:
        """Return one of its files; None if the file does not exist."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else None
