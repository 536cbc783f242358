"""Sends the points in journals that MLflow has not received yet."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from runner.config import origin
from runner.config.trust import strays
from runner.errors import Problem, RunnerError, nearest, refuse, without_password
from runner.experiment.summary import Summary
from runner.experiment.terminal import say
from runner.runs.find import ROOTS
from runner.tracking import recipes, store_uri, stores
from runner.tracking.ack import read_ack
from runner.tracking.journal import find_damage, is_being_written
from runner.tracking.sync import find_journals, sync
from runner.tracking.trackers import trackers_of


def replay(folders: list[Path], *, uri: str | None) -> list[dict[str, Any]]:
    """Send what is missing, and return a row per run: its directory, its store, and whether the store is complete.

    Args:
        folders: Directories of runs, or above them (empty: outputs/ and multirun/).
        uri: The store for all of them (None: the store of each run).

    Raises:
        RunnerError: At once, for a directory without a journal; at the end, for runs whose store is unknown.
    """
    runs = _runs(folders)
    problems: list[Problem] = []
    rows: list[dict[str, Any]] = []
    for run in runs:
        if uri is None and origin.store_of(run) == "" and run not in folders:
            send = f"sync {shlex.quote(str(run))} tracking.uri=URI"
            say(f"{run}: it was run with tracking.enabled=false; {send} sends it")
            continue
        try:
            store = uri or stores.of_run(run, asked=f"sync {shlex.quote(str(run))}")
        except RunnerError as error:
            problems += error.problems
            continue
        its_own = store_uri.shown(store) if uri is None else origin.store_of(run)
        rows.append({"folder": str(run), "tracking_uri": without_password(store), **_send(run, store, its_own=its_own)})
    for shown in dict.fromkeys(row["tracking_uri"] for row in rows):
        known = [row["is_complete"] for row in rows if row["tracking_uri"] == shown]
        say(f"{sum(known)} of {len(known)} runs are complete in {shown}")
    refuse(problems)
    return rows


def _runs(folders: list[Path]) -> list[Path]:
    problems, runs = [], []
    for folder in folders or [Path(place) for place in ROOTS if Path(place).is_dir()]:
        found = find_journals(folder)
        runs += found
        if not folder.is_dir():
            others = [str(path) for path in folder.parent.glob("*/")]
            ways = [f"python -m runner sync {shlex.quote(hit)}" for hit in nearest(str(folder), others)]
            problem = f"the directory `{folder}` does not exist"
            otherwise = "run `python -m runner sync outputs`, or name the directory of a run"
            problems.append(Problem.suggest(f"sync {folder}", problem, ways, otherwise, code="missing-file"))
        elif not found and folders:
            problem = f"there is no `journal/journal.bin` below `{folder}`, so there is nothing to send"
            problems.append(Problem(f"sync {folder}", problem, "use the directory of a run with its journal"))
    if not runs and not problems:
        problem = f"no run is below {' or '.join(ROOTS)}"
        problems.append(Problem("sync", problem, "name a directory: `python -m runner sync DIRECTORY`"))
    refuse(problems)
    return list(dict.fromkeys(runs))


def _while_it_runs(run: Path, uri: str, its_own: str | None) -> str:
    if its_own == store_uri.shown(uri):
        return "still running, and sent by its own process"
    later = f"sync {shlex.quote(str(run))} {shlex.quote(f'tracking.uri={without_password(uri)}')} when it has ended"
    if its_own is None:
        return f"still running: {later}"
    where = f"to {its_own}" if its_own else "nowhere (tracking.enabled=false)"
    return f"still running, and its own process sends it {where}: {later}"


def _send(run: Path, uri: str, *, its_own: str | None) -> dict[str, Any]:
    """Send one journal. its_own: the store that the run's process sends it to ("": none, None: unknown)."""
    if found := strays(run):
        say(f"{run}: not sent: {found[0][0]}: {found[0][1]}; rm -- {shlex.quote(str(found[0][0]))}")
        return {"is_complete": False}
    if is_being_written(run):
        say(f"{run}: {_while_it_runs(run, uri, its_own)}")
        return {"is_complete": False}
    for sentence in find_damage(run):
        say(f"{run}: {sentence}")
    before = read_ack(run)
    after = sync(run, uri, build=recipes.build_of(run))
    Summary.note(run, run_id=after.run_id, tracking_uri=after.uri or without_password(uri), tracker=after.counts)
    if after.run_id and origin.is_own(run):
        origin.sign(run, after.uri)  # its store from now on
    sent = after.points_written
    if before.run_id == after.run_id:
        sent += after.points_restored - before.points_restored - before.points_written
    if sent:
        say(f"{run}: {sent:,} points sent, run {after.run_id}")
    is_complete = after.is_complete and not after.error  # an error when the store was compared with the journal
    if not is_complete:
        say(f"{run}: {after.points_pending:,} points are left{': ' + after.error if after.error else ''}")
    for name in trackers_of(run):
        copy = sync(run, uri, tracker=name)
        if not copy.is_complete:
            is_complete = False
            say(f"{run}: {copy.error or f'tracker {name} does not have everything'}")
    return {"run_id": after.run_id, "points_sent": sent, **after.counts, "is_complete": is_complete}
