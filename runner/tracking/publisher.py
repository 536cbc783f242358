"""The training's or sweep's side of the publishing process: starts it, wakes it, waits for it at the end, and never fails for it.

It keeps the process and its pipe; what has been sent it reads in ack.json.
"""

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
from runner.tracking.ahead import Ahead, end_untold
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import has_records
from runner.tracking.sync import find_journals, sync

__all__ = ["Publisher", "find_journals", "sync"]

LOG = "journal/publish.log"  # in a run's folder
NOT_DELIVERED = 3  # the process's exit code when the store has not everything
STUCK_SECONDS = 600.0  # a publisher that reports nothing for so long is not waited for; a big model may take minutes
FAILURE_SECONDS = 2.0  # from one look for a failure to the next
STOP_SECONDS = 3.0  # after SIGTERM; only while it creates a store does it ignore that


class Publisher:
    """The training's side of `python -m runner.tracking`: starts it, wakes it, waits for it.

    A sweep has one for all of its jobs: it follows the sweep's own journal and, from follow() on, that of each job.
    Importing MLflow takes 2 to 4 s of a core, and the writers of one sqlite file wait for each other. Any thread may call.

    A process of its own, because storing 1,000 points holds the interpreter for 75 ms, and a loop of 2,500 steps a
    second makes them in 0.2 s. It lives in its own session, so Ctrl-C does not reach it. When the training dies, its
    pipe closes; then it sends what the journal holds, says so in MLflow, and ends.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None) -> None:
        """Use Publisher.start()."""
        self._folder, self._process = folder, process
        self._folders = {folder}  # all that were ever followed
        self._turn = threading.Lock()
        self._unsent = b""  # words that the full pipe did not take
        self._has_left = False
        self._has_failed, self._look_again_at = False, 0.0  # see first_failure()
        self._seen: dict[Path, float] = {}
        self._pipe = -1
        if process is not None and process.stdin is not None:
            self._pipe = process.stdin.fileno()
            if hasattr(os, "set_blocking"):  # Windows has it from Python 3.12 on; the other end reads all the time
                os.set_blocking(self._pipe, False)

    @classmethod
    def start(cls, folder: Path, uri: str, *, grace_seconds: float = 10.0, ahead: Ahead | None = None) -> Publisher:
        """Starts the process and returns at once (about 2 ms). Never raises: a run goes on without its tracker.

        grace_seconds: for how long it keeps trying a store that does not answer, once the training is over.
        ahead: holds the process, where it was started before.
        """
        folder = folder.absolute()
        process = (ahead or Ahead(uri)).taken()
        try:
            (folder / LOG).parent.mkdir(parents=True, exist_ok=True)
            if process is not None and process.stdin is not None:
                # on the pipe: the URI may hold a password, and arguments show in `ps`
                process.stdin.write(json.dumps([str(folder), uri, grace_seconds]).encode() + b"\n")
        except OSError:
            if process is not None:
                end_untold(process)
            return cls(folder, None)
        return cls(folder, process)

    def wake(self) -> None:
        """Says that a journal has grown. Never waits, never raises."""
        self._tell(pipe.NEWS)

    def follow(self, folder: Path) -> None:
        """Publishes this run's journal, too, which may not exist yet. Never waits, never raises."""
        folder = folder.absolute()
        self._folders.add(folder)
        self._tell(pipe.word(pipe.FOLLOW, folder))

    def gone(self, folder: Path) -> None:
        """Says that the run's process is over: when all of it is sent, a run without an end is marked as killed.

        Never waits, never raises. At finish() all runs count as gone.
        """
        self._tell(pipe.word(pipe.GONE, folder.absolute()))

    def ack(self) -> Ack:
        """How far the store has got, and what is wrong if something is."""
        return self.ack_of(self._folder)

    def ack_of(self, folder: Path) -> Ack:
        """The same for a run that is followed."""
        ack = read_ack(folder)
        code = None if self._process is None else self._process.poll()
        if self._process is None:
            return dataclasses.replace(ack, error="the publishing process could not be started")
        if code not in (None, 0, NOT_DELIVERED):
            error = f"the publishing process ended with exit code {code}; {self._folder / LOG} says more"
            return dataclasses.replace(ack, error=ack.error or error)
        return ack

    def first_failure(self) -> str | None:
        """The first error that keeps anything from MLflow, once; None before and afterwards. Cheap; call it often."""
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
        """Wait until MLflow has a run for this journal, or the reason is known why it has none.

        Returns: the run's ack.
        """
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
        """Announce the end and wait while the process sends anything of any run; the rest stays in the journals.

        Args:
            grace_seconds: replaces the value that start() was given.
            within: seconds to wait at most; then the process continues on its own.
            keeps_waiting: called about once a second; False ends the wait, as `within` does.

        Raises:
            KeyboardInterrupt: at once; the process continues until it gives up.
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
        """End the process now, so that `sync` can send the rest at once: what it was sending is sent again, harmlessly."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it is making a store
                self._leave()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        """After finish() there is nothing to do. A run that has not begun needs no process; else it is left to end."""
        self._say_goodbye(None)
        if self._process is None or self._process.poll() is not None:
            return
        if any(has_records(folder / JOURNAL) for folder in self._folders):
            self._leave()
        else:
            self._process.terminate()  # it has nothing to send; while it makes a store it does not listen
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
            except OSError:  # broken: ack() tells
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
