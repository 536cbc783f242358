"""A sweep that is about to run, or has run, goes in; what a person reads before and after comes out."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from runner.config import without_password
from runner.ledger import Sweep
from runner.sweep.jobs import Prepared
from runner.sweep.parent import shown
from runner.sweep.table import Table

MOST_LINES = 24


def plan(table: Table, sweep: Sweep, prepared: Sequence[Prepared], *, slots: str, is_search: bool) -> None:
    """The jobs, where they run and where their files go, and the skipped ones with the reason, before the first starts."""
    to_run = [found.job for found in prepared if found.missing is None]
    skipped = [found for found in prepared if found.missing is not None]
    done = sum(job.is_done for job in sweep.jobs.values()) - len(skipped)
    table.say(f"sweep:  {shown(sweep.folder)}")
    table.say(f"slots:  {slots}")
    if is_search:
        return
    counts = [f"{len(to_run)} to run", *([f"{len(skipped)} skipped"] if skipped else [])]
    counts += [f"{done} done before"] if done else []
    table.say(f"jobs:   {', '.join(counts)}")
    for job in to_run[:MOST_LINES]:
        again = " (goes on)" if sweep.folder_of(job).exists() else ""
        table.say(f"  {job.folder_name:<4} {job.name}{again}")
    if len(to_run) > MOST_LINES:
        table.say(f"  ... and {len(to_run) - MOST_LINES} more")
    reasons: dict[str, list[str]] = {}
    for found in skipped:
        assert found.missing is not None
        reasons.setdefault(f"{found.missing.asked}: {found.missing.so}", []).append(found.job.name)
    for reason, names in reasons.items():
        table.say(f"skipped, {reason}")
        for name in names:
            table.say(f"  {name}")


def what_next(table: Table, sweep: Sweep, config: DictConfig) -> None:
    """Where everything lies and what to type next."""
    states = [job.state for job in sweep.jobs.values()]
    folder = shown(sweep.folder)
    table.say(f"folder  {folder}")
    table.say(f"report  {folder}/report.html")
    if config.tracking.enabled:
        table.say(f"MLflow  {without_password(str(config.tracking.uri))}: python -m runner ui")
    if any(state in ("planned", "running", "interrupted") for state in states):
        table.say(f"next    the same line with sweep.resume={folder}")
    elif any(state in ("failed", "killed") for state in states):
        table.say(f"next    the same line with sweep.resume={folder} sweep.retry=true, once it is mended")
