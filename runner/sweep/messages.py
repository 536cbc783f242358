"""Tells a person what a sweep will run, in which slots, and at its end where everything lies and what to type next.

Called by sweep.py. The table of jobs that run is progress_table.py; the report's, report/text.py.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from runner.config.identity import as_read
from runner.config.validate import without_password
from runner.device import Hardware
from runner.device.benchmark import cache
from runner.device.benchmark.text import comparison
from runner.experiment.provenance import TRIES
from runner.experiment.terminal import short
from runner.sweep.jobs.ledger import Sweep
from runner.sweep.jobs.prepare import Prepared
from runner.sweep.mlflow_parent import acks
from runner.sweep.progress_table import Table
from runner.tracking import stores

MOST_LINES = 24


def kind(objectives: Sequence[Mapping[str, str]]) -> str:
    """What sort of sweep it is, in words."""
    goals = [f"{objective['direction']} {objective['metric']}" for objective in objectives]
    return f"a search ({', '.join(goals)})" if goals else "a grid"


def plan(
    table: Table,
    sweep: Sweep,
    prepared: Sequence[Prepared],
    *,
    slots: str,
    search: Sequence[tuple[str, str]],
    hardware: Hardware | None = None,
) -> None:
    """What a person reads before the first job starts.

    Of a grid, the jobs, and the skipped ones with the reason. search: what a search says of itself; empty for a grid.
    hardware: that the jobs run on; None where this process does not see it.
    """
    to_run = [found.job for found in prepared if found.missing is None]
    skipped = [found for found in prepared if found.missing is not None]
    done = sum(job.is_done for job in sweep.jobs.values()) - len(skipped)
    table.say(f"sweep:  {short(sweep.folder)}")
    table.say(f"slots:  {slots}")
    if hardware is not None and (line := measured(prepared, hardware)):
        table.say(line)
    if search:
        counts_before = Counter(job.state for job in sweep.jobs.values())
        before = [f"{count} {state}" for state, count in counts_before.items()]
        for heading, text in [*search, *([("before", ", ".join(before))] if before else [])]:
            table.say(f"{heading + ':':<8}{text}")
        return
    counts = [f"{len(to_run)} to run", *([f"{len(skipped)} skipped"] if skipped else [])]
    counts += [f"{done} done before"] if done else []
    table.say(f"jobs:   {', '.join(counts)}")
    for job in to_run[:MOST_LINES]:
        again = " (goes on)" if sweep.folder_of(job).exists() else ""
        table.say(f"  {job.folder_name:<4} {job.name}{again}")
    if len(to_run) > MOST_LINES:
        table.say(f"  ... and {len(to_run) - MOST_LINES} more")
    described = {found.job.number for found in prepared}
    if left := sum(not job.is_done and job.number not in described for job in sweep.jobs.values()):
        began = shlex.join(map(without_password, sweep.overrides))
        table.say(f"left:   not at their end, and of other words: {left} of the sweep's jobs; it began with {began}")
    reasons: dict[str, list[str]] = {}
    for found in skipped:
        assert found.missing is not None
        reasons.setdefault(f"{found.missing.asked}: {found.missing.problem}", []).append(found.job.name)
    for reason, names in reasons.items():
        table.say(f"skipped, {reason}")
        for name in names:
            table.say(f"  {name}")


def measured(prepared: Sequence[Prepared], hardware: Hardware) -> str:
    """How the kinds of devices that the jobs take compare; "" for one kind, and where `devices --bench` never ran."""
    line = comparison(cache.read(hardware), {name for found in prepared for name in found.devices})
    return f"measured: {line}" if line else ""


def to_resume(folder: str) -> str:
    """The word that goes on with a folder's sweep, as it can be typed: a shell reads it first, and then Hydra."""
    return shlex.quote("sweep.resume=" + as_read(folder, '"'))


def where(table: Table, sweep: Sweep) -> None:
    """Print where the sweep's files are."""
    table.say(f"folder  {short(sweep.folder)}")
    table.say(f"report  {short(sweep.folder)}/report.html")


def what_next(table: Table, sweep: Sweep, config: DictConfig) -> None:
    """Print what MLflow has of the sweep, why it lacks the rest, and what to type next."""
    states = [job.state for job in sweep.jobs.values()]
    folder = short(sweep.folder)
    again = to_resume(folder)
    if config.tracking.enabled:
        uri = str(config.tracking.uri)
        found = acks(sweep)
        left = [ack for ack in found if not ack.is_complete]
        where = without_password(uri)
        if left:
            reason = next((f" ({ack.error})" for ack in left if ack.error), "")
            where = f"{len(left)} of {len(found)} runs are not complete in {where}{reason}"
        verb = f"sync {shlex.quote(folder)}" if left else "ui"
        table.say(f"MLflow  {where}: {f'python -m runner {verb} {stores.words_for(uri)}'.rstrip()}")
    if Path(folder).is_relative_to(TRIES):  # a try is not gone on with
        return
    if any(state in ("planned", "running", "interrupted") for state in states):
        table.say(f"next    the same line with {again}")
    elif any(state in ("failed", "killed") for state in states):
        table.say(f"next    the same line with {again} sweep.retry=true, once it is mended")
    elif sweep.objectives:
        table.say(f"more    the same line with {again} and a higher hydra.sweeper.n_trials")
