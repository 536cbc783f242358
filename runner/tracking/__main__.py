"""`python -m runner.tracking`: the uploader, a process that copies the journals of a training or a sweep to MLflow.

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
from pathlib import Path
from typing import TextIO

from runner.config.importing import loading
from runner.tracking import mlflow_store, store_uri
from runner.tracking.pipe import Line
from runner.tracking.publish_loop import BROKEN, UploadRounds, follow
from runner.tracking.publish_run import PublishedRun
from runner.tracking.publisher import LOG
from runner.tracking.system_metrics import Machine
from runner.tracking.uploader import Known, Uploader

CONNECTIONS = 6  # to a server; the writers of a database file would only wait for each other

log = logging.getLogger("runner.tracking")


def main() -> int:
    """Run the uploader. Returns 0; 3 if something is left in a journal; 1 after an unexpected error."""
    owner = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    if hasattr(os, "nice"):
        os.nice(5)  # the training comes first
    with ExitStack() as stack:
        failure = None
        try:  # while the run is still being checked: ahead.Ahead
            stack.enter_context(mlflow_store.settings())
            if sys.argv[1:] == ["sqlite"]:
                mlflow_store.load_sqlite()
        except Exception as error:  # raised below, when the log file is open
            failure = error
        settings = _first_line(sys.stdin.fileno())
        if not settings:  # the run never started
            return 0
        name, uri, grace_seconds = json.loads(settings)
        os.environ["MLFLOW_TRACKING_URI"] = uri
        folder = Path(name)
        with (folder / LOG).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        _write_masked(uri)
        if failure is not None:
            raise failure
        return _publish(folder, uri, Line(sys.stdin.fileno(), grace_seconds=grace_seconds), owner=owner)


def _first_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(fd, 1)):
            return b""
        line += byte
    return line


def _publish(folder: Path, uri: str, line: Line, *, owner: int) -> int:
    path = store_uri.sqlite_path(uri)
    if path is not None and path.exists():
        _open_sqlite(uri)
    gc.freeze()  # else each collection would visit MLflow's 300,000 objects

    machine, known = Machine(), Known()

    def upload(folder: Path, lives: bool) -> Uploader:
        if path is not None and not path.exists():  # not earlier: a run with an error must not leave a store
            _open_sqlite(uri)
        how = {"rest": line.rest, "takes_graph": True, "known": known}
        return Uploader(folder, uri, machine=machine if lives else None, **how)  # type: ignore[arg-type]

    try:
        rounds = UploadRounds(
            folder,
            run_of=lambda folder: PublishedRun(folder, upload),
            ask=lambda: _what_is_wrong(uri),
            num_at_once=CONNECTIONS if uri.startswith(("http:", "https:")) else 1,
        )
        return follow(rounds, line, has_owner=lambda: os.getppid() == owner)
    except Exception:
        log.exception("unexpected error")
        return BROKEN


def _what_is_wrong(uri: str) -> str | None:
    try:
        mlflow_store.ask(uri)
    except Exception as error:
        return mlflow_store.explain(error, uri=uri)
    return None


def _open_sqlite(uri: str) -> None:
    ended = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a half-created store could not be opened again
    try:
        with loading():  # alembic imports 60 migrations
            mlflow_store.open_store(uri)
    except Exception as error:  # reported when there is something to send
        log.warning("the store does not open: %s", mlflow_store.explain(error, uri=uri))
    finally:
        signal.signal(signal.SIGTERM, ended)


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
