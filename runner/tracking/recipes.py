"""Which of the models that a journal asks for are built as the person's own: asked before a run or a sweep goes on, and by `sync`.

A journal grows, and is not signed: what lies in it may be of whoever has had the folder. One recipe is the person's, that of
the signed model.json; every other one is held to the rules for a stranger's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.config import instantiate, origin, run_files, trust
from runner.errors import Problem, RunnerError, refuse
from runner.tracking.ack import read_ack
from runner.tracking.journal_records import FILE, scan_events
from runner.tracking.mlflow_model import Build, build_own


def check(folder: Path) -> None:
    """Before a run goes on in a folder, which is the person's own from then on. Reads the journal once.

    Raises: RunnerError for each thing in its journal that is not for a stranger to say, or that no run has written.
    """
    if trust.is_trusted() or not (folder / FILE).is_file():
        return
    known, found = _signed(folder), []
    for event in _events(folder):
        if event.get("kind") == "start" and not str(event.get("uid", "")).isalnum():
            found.append(
                Problem(f"{folder / FILE}", "a run in the file has no `uid`", "restore the file as the run wrote it")
            )
        elif (node := event.get("node")) is not None and node != known:
            found += trust.recipe_problems(node, folder / FILE)
    refuse(dict.fromkeys(found))


def build_of(folder: Path) -> Build | None:
    """What makes this journal's models; None: whatever they are, as their run would."""
    if trust.is_trusted():
        return None
    known = _signed(folder)
    return lambda node: build_own(node) if node == known else instantiate.build(node, key="model", own_code=False)


def _signed(folder: Path) -> Any:
    if not origin.is_own(folder):
        return None
    try:
        return run_files.read_json(folder / origin.SIGNED[1])["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from scan_events(folder / FILE)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"the file can't be read: {type(error).__name__}: {error}"
        raise RunnerError.of(str(folder / FILE), problem, "restore the file as the run wrote it") from None
    yield from read_ack(folder).postponed
