"""Write and read model.json: how to build a run's model, and what its inputs are, for use after training."""

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
    """Plain values, as it is used on other machines. Nodes are for `build()`."""

    model: dict[str, Any]  # the node of the complete model, with its preprocessing
    task: dict[str, Any]
    reader: dict[str, Any] | None  # the node of the reader of input files; None: arrays as they are
    classes: tuple[str, ...]
    targets: tuple[str, ...]  # names of a regression's targets; () if unknown
    data: str  # the data set's name
    facts: dict[str, Any] = field(default_factory=dict)


def write_card(folder: Path, card: Card) -> None:
    (folder / NAME).write_text(json.dumps(asdict(card), indent=2) + "\n")


def read_card(folder: Path) -> Card:
    """Read the card of a run. Raises: RunnerError if it is missing or invalid."""
    file = folder / NAME
    try:
        found = run_files.read_json(file)
        card = Card(**{**found, "classes": tuple(found["classes"]), "targets": tuple(found["targets"])})
    except FileNotFoundError:
        problem = "the run did not get as far as its model, or an earlier version wrote it"
        raise RunnerError.of(
            str(file), f"the file does not exist: {problem}", "use a run that has trained", code="missing-file"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"the file can't be read: {type(error).__name__}: {error}"
        raise RunnerError.of(str(file), problem, "restore the file as the run wrote it") from None
    return card
