"""Folders go in; the journals in them that MLflow has not got are sent, and a line for each comes out."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from runner.config import without_password
from runner.errors import Fault, RunnerError

SECONDS_FOR_AN_ANSWER = 10


def replay(folders: list[Path], *, uri: str) -> int:
    """Sends what is missing. Returns 0, or 1 when the store could not be reached. Raises: RunnerError for a missing folder."""
    faults = [
        Fault(f"sync {folder}", "there is no such folder", "sync outputs, or a run's own folder below it")
        for folder in folders
        if not folder.is_dir()
    ]
    if faults:
        raise RunnerError(*faults)
    runs = find_runs(folders or [Path("outputs"), Path("multirun")])
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from runner.publish import publish_model
    from runner.tracking.uploader import Unreachable, Uploader

    missing = 0
    for run in runs:
        uploader = Uploader(
            run,
            uri,
            patience=lambda silent: silent < SECONDS_FOR_AN_ANSWER,
            publish_model=lambda *event: publish_model(*event, uri=uri),
        )
        before = uploader.ack.points_written
        try:
            uploader.drain()
            uploader.end("KILLED", end_ms=int(time.time() * 1000), why="the process ended without a word")
        except Unreachable as silence:
            print(f"{run}: {without_password(uri)} does not answer: {silence}")
            missing += 1
            continue
        if sent := uploader.ack.points_written - before:
            print(f"{run}: {sent:,} points sent, run {uploader.ack.run_id}")
    print(f"{len(runs) - missing} of {len(runs)} runs are complete in {without_password(uri)}")
    return int(missing > 0)


def find_runs(folders: list[Path]) -> list[Path]:
    """Every run's folder below the folders, oldest first."""
    return sorted({path.parent.parent for folder in folders for path in folder.rglob("journal/journal.bin")})
