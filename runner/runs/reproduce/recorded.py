"""Defines a run that was: what it was run with and what it measured. original.py makes it from a folder or a store."""

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
    """A run that was."""

    name: str  # its folder, or its id and the store that it lies on
    run_id: str | None  # in MLflow; None: it was not tracked
    folder: Path  # that holds its rerun.yaml and, where it has them, its environment.txt and git.diff
    store: str | None  # the URI that it was fetched from; None: `folder` is its own
    status: str  # finished, pruned, killed, failed; as a store says it: finished, killed, failed, running
    tags: Mapping[str, str]
    dataset: Mapping[str, Any]  # its name, digest and profile; empty where nothing is known
    num_steps: int | None  # that it was to have
    series: Mapping[str, Points]

    @property
    def last_step(self) -> int:
        """The last step that it measured."""
        return last_step(self.series)

    @property
    def is_whole(self) -> bool:
        """Whether it went as far as it was to go, as far as can be told."""
        return self.status == "finished" and (self.num_steps is None or self.last_step >= self.num_steps)

    @property
    def data(self) -> str | None:
        """The data in words, with its fingerprint; None where that is not known."""
        digest = str(self.dataset.get("digest") or "")
        return f"{self.dataset.get('name')}, {self._num_rows} rows, fingerprint {digest[:12]}" if digest else None

    @property
    def _num_rows(self) -> str:
        try:
            return f"{json.loads(self.dataset['profile'])['num_rows']:,}"
        except (KeyError, TypeError, ValueError):
            return "?"

    def chosen(self) -> dict[str, Any]:
        """What its person has chosen, by dotted key, as its rerun.yaml has it."""
        values = defaults.values_of(self.folder / RERUN)
        return {key: value for key, value in values.items() if not key.startswith(NOT_CHOSEN)}

    def read(self, name: str) -> str | None:
        """The text of one of its files; None where it has none."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else None


def num_steps_of(params: Mapping[str, Any]) -> int | None:
    """How many steps a run was to have, by its parameters."""
    try:
        return int(params["facts.num_steps"])
    except (KeyError, ValueError):
        return None
