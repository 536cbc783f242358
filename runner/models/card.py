"""Writes and reads model.json: what a run's model is and what it takes, for all that comes after training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config import run_files
from runner.errors import RunnerError

NAME = "model.json"


@dataclass(frozen=True)
class Card:
    """Plain values: it goes to other machines. Nodes are what `build()` takes."""

    model: dict[str, Any]  # the node of the whole model, with what stands around it
    task: dict[str, Any]
    reader: dict[str, Any] | None  # what reads inputs of this kind from a file; None: arrays as they are
    classes: tuple[str, ...]
    targets: tuple[str, ...]  # the names of what a regression says; () where nobody named them
    data: str  # the data set's name
    facts: dict[str, Any] = field(default_factory=dict)


def write_card(folder: Path, card: Card) -> None:
    (folder / NAME).write_text(json.dumps(asdict(card), indent=2) + "\n")


def read_card(folder: Path) -> Card:
    """Raises: RunnerError where there is none, or one that no run has written."""
    file = folder / NAME
    try:
        found = run_files.read_json(file)
        card = Card(**{**found, "classes": tuple(found["classes"]), "targets": tuple(found["targets"])})
    except FileNotFoundError:
        problem = "the run did not get as far as its model, or an earlier version wrote it"
        raise RunnerError.of(
            str(file), f"there is no such file: {problem}", "use a run that has trained", code="missing-file"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"the file can't be read: {type(error).__name__}: {error}"
        raise RunnerError.of(str(file), problem, "restore the file as the run wrote it") from None
    return card
