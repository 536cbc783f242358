"""What the uploader writes next to a journal: ack.json, rejected.jsonl, and its log, all without passwords."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.tracking import store_uri
from runner.tracking.ack import Ack, read_ack, write_ack
from runner.tracking.journal_records import FILE, begins_record, scan
from runner.tracking.mlflow_store import explain

REJECTED = "journal/rejected.jsonl"  # in a run's folder

log = logging.getLogger("runner.tracking")


class UploadProgress:
    """The Ack of one run and one store, written to disk after each change.

    An Ack of another store or another journal is discarded.
    """

    def __init__(self, folder: Path, uri: str) -> None:
        self._folder, self._uri, self._mask = folder, uri, store_uri.masker(uri)
        self.ack = dataclasses.replace(read_ack(folder), points_pending=0)
        if self.ack.uri != store_uri.shown(uri) or not begins_record(folder / FILE, self.ack.offset):
            self.ack = Ack(uri=store_uri.shown(uri))

    def note(self, **changes: Any) -> None:
        """Change fields of the Ack and write it."""
        self.ack = dataclasses.replace(self.ack, **changes)
        write_ack(self._folder, self.ack)

    def begin_again(self, *, is_same_run: bool = False) -> None:
        """Forget what the store acknowledged: it has lost the run, or points of the same run."""
        (self._folder / REJECTED).unlink(missing_ok=True)
        kept = ("run_id", "experiment_id", "uid", "points_restored") if is_same_run else ()
        self.ack = Ack(uri=self.ack.uri, **{name: getattr(self.ack, name) for name in kept})
        self.note()

    def warn(self, text: str) -> None:
        """Log and store that something was left out."""
        text = self._mask(text)
        log.warning(text)
        if text not in self.ack.warnings:
            self.note(warnings=(*self.ack.warnings, text))

    def fail(self, error: Exception, *, what: str = "") -> None:
        """Log and store an error after which sending is tried again."""
        starts = (dict(record.data) for record in scan(self._folder / FILE) if record.kind == "start")  # type: ignore[arg-type]
        experiment = None
        with contextlib.suppress(ValueError, OSError):
            experiment = next(starts, {}).get("experiment")
        text = explain(error, uri=self._uri, experiment=experiment and str(experiment))
        text = f"{what}: {text}" if what else text
        if text != self.ack.error:  # one traceback per outage
            log.warning("%s", text)
            log.info("traceback of this error", exc_info=error)  # not shown by `sync`
            self.note(error=text)

    def reject(self, kind: str, refused: Iterable[tuple[Any, str]]) -> None:
        """Append what the store refuses to rejected.jsonl."""
        lines = []
        for item, why in refused:
            fields = {
                name: getattr(item, name) for name in ("key", "value", "step", "timestamp") if hasattr(item, name)
            }
            lines.append(json.dumps({"kind": kind, **fields, "why": self._mask(why)}) + "\n")
        if lines:
            with (self._folder / REJECTED).open("a") as file:
                file.writelines(lines)
