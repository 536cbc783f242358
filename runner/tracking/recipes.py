"""Decides which models in a journal may use the user's code.

A journal is not signed, so its models follow the rules for untrusted configurations, except the one in the signed model.json.
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
    """Check the journal before a run is resumed, after which its directory is trusted. Reads the journal once.

    Raises:
        RunnerError: For each model that is not allowed, and each record that no run writes.
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
    """Return the function that builds this journal's models; None: as in a run."""
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
