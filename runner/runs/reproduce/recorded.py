"""A recorded run: its configuration and its metrics. original.py reads it from a directory or a store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config import defaults
from runner.config.identity import NOT_CHOSEN
from runner.runs.reproduce.compare import Points, last_step

RERUN, ENVIRONMENT, DIFF = "rerun.yaml", "environment.txt", "git.diff"


@dataclass(frozen=True)
class Original:
    """A recorded run."""

    name: str  # its directory, or its id and store
    run_id: str | None  # in MLflow; None: it was not tracked
    folder: Path  # with its rerun.yaml, and environment.txt and git.diff if they exist
    store: str | None  # the URI it was fetched from; None: `folder` is the run directory
    status: str  # finished, pruned, killed or failed; from a store: finished, killed, failed or running
    tags: Mapping[str, str]
    dataset: Mapping[str, Any]  # name, digest and profile; empty if unknown
    num_steps: int | None  # planned
    series: Mapping[str, Points]

    @property
    def last_step(self) -> int:
        """The last step with a metric."""
        return last_step(self.series)

    @property
    def is_whole(self) -> bool:
        """Whether it reached its planned end, as far as is known."""
        return self.status == "finished" and (self.num_steps is None or self.last_step >= self.num_steps)

    @property
    def data(self) -> str | None:
        """The name, size and fingerprint of the data; None if unknown."""
        digest = str(self.dataset.get("digest") or "")
        return f"{self.dataset.get('name')}, {self._num_rows} rows, fingerprint {digest[:12]}" if digest else None

    @property
    def _num_rows(self) -> str:
        try:
            return f"{json.loads(self.dataset['profile'])['num_rows']:,}"
        except (KeyError, TypeError, ValueError):
            return "?"

    def chosen(self) -> dict[str, Any]:
        """Return the chosen values of its rerun.yaml by dotted key."""
        values = defaults.values_of(self.folder / RERUN)
        return {key: value for key, value in values.items() if not key.startswith(NOT_CHOSEN)}

    def read(self, name: str) -> str | None:
        """Return the text of one of its files; None if the file does not exist."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else None


def num_steps_of(params: Mapping[str, Any]) -> int | None:
    """Return the planned number of steps in the run's parameters."""
    try:
        return int(params["facts.num_steps"])
    except (KeyError, ValueError):
        return None
