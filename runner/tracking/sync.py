"""Send one journal to MLflow in this process, each point once: for `sync`, `register` and resumed runs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from filelock import FileLock, Timeout

from runner.tracking.ack import Ack, read_ack
from runner.tracking.backoff import Backoff
from runner.tracking.journal import is_being_written
from runner.tracking.journal_records import FILE
from runner.tracking.mlflow_model import Build
from runner.tracking.mlflow_store import settings
from runner.tracking.uploader import Uploader

LOCK = "journal/publish.lock"  # in a run directory: one process sends a journal at a time


def sync(folder: Path, uri: str, *, grace_seconds: float = 10.0, build: Build | None = None) -> Ack:
    """Send what is missing; imports MLflow (1 s). A run whose process was killed gets the status KILLED.

    grace_seconds: How long to retry a store that does not answer; the Ack's `error` then has the reason.
    """
    try:
        with FileLock(folder / LOCK, timeout=0, thread_local=False), settings():
            _send(Uploader(folder, uri, build=build), folder, grace_seconds=grace_seconds)
    except Timeout:
        error = "another process is sending this run at this moment"
        return dataclasses.replace(read_ack(folder), error=error)
    return read_ack(folder)


def find_journals(root: Path) -> list[Path]:
    """Return the directories of all runs with a journal at or below `root`, sorted by name, i.e., by date."""
    return sorted(path.parent.parent for path in root.rglob(FILE))


def _send(uploader: Uploader, folder: Path, *, grace_seconds: float) -> None:
    patience = Backoff()
    while True:
        before = uploader.ack.offset, uploader.ack.postponed
        sent = uploader.attempt(postponed=True)
        if (sent or uploader.only_waits()) and (is_being_written(folder) or uploader.abandon()) and sent:
            return
        if uploader.only_waits_for_parent():
            return  # the parent's journal is not sent here
        if (uploader.ack.offset, uploader.ack.postponed) != before:
            patience.worked()
        if patience.silent_seconds() > grace_seconds:
            return
        time.sleep(patience.pause_seconds())
