"""Prints what a sweep will run and in which slots, and at its end where the results are and how to continue.

Called by sweep.py. The live table is in progress_table.py, the table at the end in report/tables.py.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from runner.config.identity import as_read, key_of
from runner.config.secrets import HIDDEN
from runner.errors import without_password
from runner.experiment.provenance import TRIES
from runner.experiment.terminal import row, short
from runner.sweep.jobs.ledger import DEFAULTS, Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.mlflow_parent import acks
from runner.sweep.progress_table import Table
from runner.tracking import stores

MAX_LINES = 24


def kind(objectives: Sequence[Mapping[str, str]]) -> str:
    """Return the kind of a sweep, for messages."""
    goals = [f"{objective['direction']} {objective['metric']}" for objective in objectives]
    return f"a search ({', '.join(goals)})" if goals else "a grid"


def plan(
    table: Table,
    sweep: Sweep,
    prepared: Sequence[PreparedJob],
    *,
    slots: str,
    search: Sequence[tuple[str, str]],
) -> None:
    """Print the slots and the jobs before the first one starts, and the skipped ones with the reason.

    search: the lines of a search, by label; empty for a grid.
    """
    to_run = [each.job for each in prepared if each.missing is None]
    skipped = [(each.job, each.missing) for each in prepared if each.missing is not None]
    table.say(row("sweep", short(sweep.folder)))
    table.say(row("slots", slots))
    if search:
        states = Counter(job.state for job in sweep.jobs.values())
        before = ", ".join(f"{count} {state}" for state, count in states.items())
        for heading, text in [*search, *([("before", before)] if before else [])]:
            table.say(row(heading, text))
        return
    done = sum(job.is_done for job in sweep.jobs.values()) - len(skipped)
    optional = [f"{count} {word}" for count, word in ((len(skipped), "skipped"), (done, "done before")) if count > 0]
    table.say(row("jobs", ", ".join([f"{len(to_run)} to run", *optional])))
    for job in to_run[:MAX_LINES]:
        again = " (resumed)" if sweep.folder_of(job).exists() else ""
        table.say(f"  {job.folder_name:<6} {job.name or DEFAULTS}{again}")
    if len(to_run) > MAX_LINES:
        table.say(f"  ... and {len(to_run) - MAX_LINES} more")
    described = {each.job.number for each in prepared}
    if left := sum(not job.is_done and job.number not in described for job in sweep.jobs.values()):
        began = shlex.join(map(without_password, sweep.overrides))
        jobs = "1 unfinished job is" if left == 1 else f"{left} unfinished jobs are"
        table.say(f"note: {jobs} not covered by these overrides; the sweep was started with {began}")
    reasons: dict[str, list[str]] = {}
    for job, missing in skipped:
        reasons.setdefault(f"{missing.source}: {missing.message}", []).append(job.name)
    for reason, names in reasons.items():
        table.say(row("skipped", reason))
        for name in names:
            table.say(f"  {name or DEFAULTS}")


def to_resume(folder: str) -> str:
    """Return the override that resumes the sweep in a directory, quoted for the shell and for Hydra."""
    return shlex.quote("sweep.resume=" + as_read(folder, '"'))


def resume_command(folder: str, *more: str) -> str:
    """Return the whole command that resumes a sweep: this one's arguments without passwords, and sweep.resume."""
    replaced = ("sweep.resume", "sweep.retry", *map(key_of, more))
    words = [HIDDEN.sub("PASSWORD", without_password(word)) for word in sys.argv[1:] if key_of(word) not in replaced]
    return " ".join(["python -m runner", *map(shlex.quote, words), to_resume(folder), *more])


def what_next(table: Table, sweep: Sweep, config: DictConfig) -> None:
    """Print what MLflow has of the sweep, why it lacks the rest, and the command that continues the sweep."""
    states = [job.state for job in sweep.jobs.values()]
    folder = short(sweep.folder)
    if config.tracking.enabled:
        uri, every = str(config.tracking.uri), acks(sweep)
        left = [ack for ack in every if not ack.is_complete]
        shown, named = without_password(uri), stores.words_for(uri)
        if left:
            reason = next((f": {ack.error}" for ack in left if ack.error), "")
            table.say(row("mlflow", f"{shown}  ({len(left)} of {len(every)} runs are incomplete{reason})"))
            table.say(row("sync", f"python -m runner sync {shlex.quote(folder)} {named}".rstrip()))
        else:
            table.say(row("mlflow", f"{shown}  (view: {f'python -m runner ui {named}'.rstrip()})"))
    if Path(folder).is_relative_to(TRIES):  # a try is not resumed
        return
    if any(state in ("planned", "running", "interrupted") for state in states):
        table.say(row("resume", resume_command(folder)))
    elif any(state in ("failed", "killed") for state in states):
        table.say(row("retry", resume_command(folder, "sweep.retry=true")))
    elif sweep.objectives:
        table.say(row("more", resume_command(folder, f"hydra.sweeper.n_trials={2 * len(states)}")))
