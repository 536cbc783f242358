"""Folders go in; the journals in them that MLflow has not got are sent, and a line for each comes out."""

from __future__ import annotations

from pathlib import Path

from runner.config import without_password
from runner.errors import Fault, RunnerError
from runner.tracking.ack import read_ack
from runner.tracking.damage import find_damage
from runner.tracking.journal import is_being_written
from runner.tracking.publisher import find_journals, sync
from runner.trust import strays

PLACES = ("outputs", "multirun")


def replay(folders: list[Path], *, uri: str) -> int:
    """Sends what is missing. Returns 0, or 1 when something is left. Raises: RunnerError for a folder that is not there."""
    faults = [
        Fault(f"sync {folder}", "there is no such folder", "sync outputs, or a run's own folder below it")
        for folder in folders
        if not folder.is_dir()
    ]
    if faults:
        raise RunnerError(*faults)
    roots = folders or [Path(place) for place in PLACES if Path(place).is_dir()]
    runs = [run for root in roots for run in find_journals(root)]
    shown = without_password(uri)
    complete = 0
    for run in runs:
        if found := strays(run):
            print(f"{run}: not sent: {found[0][0]}: {found[0][1]}; rm {found[0][0]}")
            continue
        if is_being_written(run):
            print(f"{run}: still running, and sent by its own process")
            complete += 1
            continue
        for sentence in find_damage(run):
            print(f"{run}: {sentence}")
        before = read_ack(run)
        after = sync(run, uri)
        complete += after.is_complete
        sent = after.points_written - (before.points_written if before.run_id == after.run_id else 0)
        if sent:
            print(f"{run}: {sent:,} points sent, run {after.run_id}")
        if not after.is_complete:
            print(f"{run}: {after.points_pending:,} points are left{': ' + after.error if after.error else ''}")
    print(f"{complete} of {len(runs)} runs are complete in {shown}")
    return int(complete < len(runs))
