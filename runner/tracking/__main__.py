"""`python -m runner.tracking [tracker NAME]`: the uploader, which copies the journals of a training or a sweep to one tracker.

publisher.Publisher starts it. It runs one loop over all runs that it follows; its state is in each run's ack.json.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

from runner.tracking import mlflow_store, store_uri
from runner.tracking.ack import named_for
from runner.tracking.follow import BROKEN, ORPHAN_SECONDS, UploadLoop
from runner.tracking.pipe import Line
from runner.tracking.publisher import LOG, NOT_DELIVERED
from runner.tracking.sync import FollowedRun
from runner.tracking.system_metrics import Machine
from runner.tracking.trackers import TrackerUploader
from runner.tracking.uploader import Known, Uploader

CONNECTIONS = 6  # to a server; the writers of a database file would only wait for each other

log = logging.getLogger("runner.tracking")


def main() -> int:
    """Run the uploader. Returns 0; 3 if something is left in a journal; 1 after an unexpected error."""
    owner = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    os.nice(5)  # the training comes first
    pipe = os.fdopen(sys.stdin.fileno(), "rb", closefd=False)  # not sys.stdin, which exit() would wait for
    tracker = sys.argv[2] if sys.argv[1:2] == ["tracker"] else ""
    with ExitStack() as stack:
        failure = None
        try:  # while the run is still being checked: ahead.Ahead
            if not tracker:
                stack.enter_context(mlflow_store.settings())
            if sys.argv[1:] == ["sqlite"]:
                mlflow_store.load_sqlite()
        except Exception as error:  # raised below, when the log file is open
            failure = error
        if not (settings := pipe.readline()).endswith(b"\n"):  # the run never started
            return 0
        name, uri, grace_seconds = json.loads(settings)
        os.environ["MLFLOW_TRACKING_URI"] = uri
        folder = Path(name)
        with (folder / named_for(LOG, tracker)).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        _write_masked(uri)
        if failure is not None:
            raise failure
        line = Line(pipe, grace_seconds=grace_seconds)
        send = partial(_send_to_tracker, tracker) if tracker else partial(_upload, uri)
        return send(folder, line, has_owner=lambda: os.getppid() == owner)


def _send_to_tracker(name: str, folder: Path, line: Line, *, has_owner: Callable[[], bool]) -> int:
    def run_of(folder: Path) -> FollowedRun:
        return FollowedRun(folder, lambda folder, _: TrackerUploader(folder, name, rest=line.rest), tracker=name)

    line.call_later(ORPHAN_SECONDS, lambda: os._exit(NOT_DELIVERED))  # the package's code may hang
    return UploadLoop(folder, line, run_of=run_of, ask=lambda: None).run(has_owner=has_owner)


def _upload(uri: str, folder: Path, line: Line, *, has_owner: Callable[[], bool]) -> int:
    path = store_uri.sqlite_path(uri)
    if path is not None and path.exists():
        mlflow_store.problem(uri)  # opens it; a new one is created when there is something to send
    gc.freeze()  # else each collection would visit MLflow's 300,000 objects
    machine, known = Machine(), Known()

    def uploader_of(folder: Path, is_running: bool) -> Uploader:
        measured = machine if is_running else None
        return Uploader(folder, uri, machine=measured, rest=line.rest, takes_graph=True, known=known)

    try:
        loop = UploadLoop(
            folder,
            line,
            run_of=lambda folder: FollowedRun(folder, uploader_of),
            ask=lambda: mlflow_store.problem(uri),
            num_at_once=CONNECTIONS if uri.startswith(("http:", "https:")) else 1,
        )
        return loop.run(has_owner=has_owner)
    except Exception:
        log.exception("unexpected error")
        return BROKEN


def _write_masked(uri: str) -> None:
    mask = store_uri.masker(uri)
    sys.stdout, sys.stderr = _Masked(sys.stdout, mask), _Masked(sys.stderr, mask)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)


class _Masked:
    def __init__(self, stream: TextIO, mask: Callable[[str], str]) -> None:
        self._stream, self._mask = stream, mask

    def write(self, text: str) -> int:
        return self._stream.write(self._mask(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main())
