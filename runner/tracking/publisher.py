"""The training's or sweep's side of the uploader: start it, wake it, and wait for it at the end. Errors never reach the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from runner.config import run_files
from runner.tracking import pipe
from runner.tracking.ack import FILE as ACK
from runner.tracking.ack import Ack, read_ack
from runner.tracking.ahead import Ahead, kill_unused
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import has_records
from runner.tracking.sync import find_journals, sync

__all__ = ["Publisher", "find_journals", "sync"]

LOG = "journal/publish.log"  # in a run's folder
NOT_DELIVERED = 3  # exit code if the store does not have everything
STUCK_SECONDS = 600.0  # without progress, the wait at the end stops; a large model may take minutes
FAILURE_SECONDS = 2.0  # between two looks for a failure
STOP_SECONDS = 3.0  # after SIGTERM, which it ignores while it creates a store


class Publisher:
    """An uploader process. Any thread may call its methods.

    A sweep has one for its own journal and, after follow(), for those of its jobs: importing MLflow takes 2 to 4 s, and
    writers of one sqlite file wait for each other. It is a process because storing 1,000 points holds the interpreter
    for 75 ms, and it has its own session, so Ctrl-C does not reach it. When the training is killed, the pipe closes: the
    uploader sends the rest of the journal, sets the run's status, and ends.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None) -> None:
        """Use Publisher.start()."""
        self._folder, self._process = folder, process
        self._folders = {folder}  # of all followed runs
        self._turn = threading.Lock()
        self._unsent = b""  # lines that the full pipe did not take
        self._has_left = False
        self._has_failed, self._look_again_at = False, 0.0  # see first_failure()
        self._seen: dict[Path, float] = {}
        self._pipe = -1
        if process is not None and process.stdin is not None:
            self._pipe = process.stdin.fileno()
            if hasattr(os, "set_blocking"):  # on Windows since Python 3.12
                os.set_blocking(self._pipe, False)

    @classmethod
    def start(cls, folder: Path, uri: str, *, grace_seconds: float = 10.0, ahead: Ahead | None = None) -> Publisher:
        """Start the process; returns at once (about 2 ms). Never raises: a run continues without its tracker.

        Args:
            grace_seconds: How long it retries after the end of the training.
            ahead: Has the process if it is started already.
        """
        folder = folder.absolute()
        process = (ahead or Ahead(uri)).taken()
        try:
            (folder / LOG).parent.mkdir(parents=True, exist_ok=True)
            if process is not None and process.stdin is not None:
                # through the pipe: the URI may contain a password, and `ps` shows arguments
                process.stdin.write(json.dumps([str(folder), uri, grace_seconds]).encode() + b"\n")
        except OSError:
            if process is not None:
                kill_unused(process)
            return cls(folder, None)
        return cls(folder, process)

    def wake(self) -> None:
        """Report that a journal has grown. Never waits, never raises."""
        self._tell(pipe.NEWS)

    def follow(self, folder: Path) -> None:
        """Send this run's journal, too; it may not exist yet. Never waits, never raises."""
        folder = folder.absolute()
        self._folders.add(folder)
        self._tell(pipe.word(pipe.FOLLOW, folder))

    def gone(self, folder: Path) -> None:
        """Report that the run's process has ended: a run without an end is then marked as killed.

        Never waits, never raises. finish() reports it for all runs.
        """
        self._tell(pipe.word(pipe.GONE, folder.absolute()))

    def ack(self) -> Ack:
        """Return how much the store has, and an error if there is one."""
        return self.ack_of(self._folder)

    def ack_of(self, folder: Path) -> Ack:
        """Return the same for a followed run."""
        ack = read_ack(folder)
        code = None if self._process is None else self._process.poll()
        if self._process is None:
            return dataclasses.replace(ack, error="the uploader could not be started")
        if code not in (None, 0, NOT_DELIVERED):
            error = f"the uploader ended with exit code {code}; {self._folder / LOG} says more"
            return dataclasses.replace(ack, error=ack.error or error)
        return ack

    def first_failure(self) -> str | None:
        """Return the first error that prevents sending, once; else None. Cheap: reads files every two seconds."""
        if self._has_failed or time.monotonic() < self._look_again_at:
            return None
        self._look_again_at = time.monotonic() + FAILURE_SECONDS
        changed = {path: at for path in tuple(self._folders) if (at := _written_at(path)) != self._seen.get(path, -1.0)}
        self._seen |= changed
        errors = [error for error in map(_error_in, changed) if error is not None and not error.startswith("parent ")]
        if self._process is None or self._process.poll() is not None:
            errors = list(filter(None, [self.ack().error]))
        self._has_failed = bool(errors)
        return errors[0] if errors else None

    def wait_for_run(self, folder: Path, *, seconds: float, keeps_waiting: Callable[[], bool] = lambda: True) -> Ack:
        """Wait until MLflow has this run, or an error is known. Returns the run's Ack."""
        until = time.monotonic() + seconds
        while (ack := self.ack_of(folder)).state == "waiting" and (folder / JOURNAL).is_file():
            if time.monotonic() > until or not keeps_waiting():
                break
            time.sleep(0.2)  # each look counts the points of its journal
        return ack

    def finish(
        self,
        *,
        grace_seconds: float | None = None,
        within: float = math.inf,
        keeps_waiting: Callable[[], bool] = lambda: True,
    ) -> Ack:
        """Announce the end, and wait while the process makes progress; the rest stays in the journals.

        Args:
            grace_seconds: Replaces the value of start().
            within: Seconds to wait at most; the process then continues alone.
            keeps_waiting: Called about once a second; False ends the wait, as `within` does.

        Raises:
            KeyboardInterrupt: At once; the process continues until its grace time ends.
        """
        self._say_goodbye(grace_seconds)
        if self._process is not None:
            try:
                self._wait(self._process, within, keeps_waiting)
            except BaseException:
                self._leave()
                raise
        return self.ack()

    def stop(self) -> None:
        """End the process now, so that `sync` can send the rest. Points that are sent twice are stored once."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it is creating a store
                self._leave()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        """After an error: end the process if no run has started, else let it send the rest."""
        self._say_goodbye(None)
        if self._process is None or self._process.poll() is not None:
            return
        if any(has_records(folder / JOURNAL) for folder in self._folders):
            self._leave()
        else:
            self._process.terminate()  # ignored while it creates a store
            self._process.wait()
            self._close_pipe()

    def _wait(self, process: subprocess.Popen[bytes], within: float, keeps_waiting: Callable[[], bool]) -> None:
        last, seen = time.monotonic(), -1.0
        deadline = last + within
        while (now := time.monotonic()) - last < STUCK_SECONDS and now < deadline and keeps_waiting():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(1.0, deadline - now))
                self._close_pipe()
                return
            self._hang_up()
            written = max(map(_written_at, self._folders))
            last, seen = (last, seen) if written == seen else (time.monotonic(), written)
        self._leave()

    def _leave(self) -> None:
        if self._process is not None:
            threading.Thread(target=self._see_off, args=(self._process,), name="runner-publisher", daemon=True).start()

    def _see_off(self, process: subprocess.Popen[bytes]) -> None:
        while not self._hang_up():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
                break
        process.wait()
        self._close_pipe()

    def _say_goodbye(self, grace_seconds: float | None) -> None:
        if not self._has_left:
            self._has_left = True
            self._tell(pipe.bye(grace_seconds))
        self._hang_up()

    def _hang_up(self) -> bool:
        self._tell(b"")
        if not self._unsent:
            self._close_pipe()
        return self._pipe < 0

    def _close_pipe(self) -> None:
        with self._turn, contextlib.suppress(OSError):
            self._pipe = -1
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def _tell(self, words: bytes) -> None:
        with self._turn:
            if words != pipe.NEWS or not self._unsent:
                self._unsent += words
            try:
                while self._unsent and self._pipe >= 0:
                    self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # a broken pipe: ack() reports the exit code
                pass
            self._unsent = b""


def _error_in(folder: Path) -> str | None:
    try:
        error = run_files.read_json(folder / ACK)["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if error is None else str(error)


def _written_at(folder: Path) -> float:
    try:
        return (folder / ACK).stat().st_mtime
    except OSError:
        return -1.0
