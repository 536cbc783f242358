"""The training's or sweep's side of the uploader: start it, and wait for it at the end. Errors never reach the run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runner.tracking.ack import FILE as ACK
from runner.tracking.ack import Ack, named_for, read_ack, read_error
from runner.tracking.ahead import Ahead
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import has_records
from runner.tracking.pipe import BYE, FOLLOW, GONE, line_of

LOG = "journal/publish.log"  # in a run's folder
NOT_DELIVERED = 3  # exit code if the store does not have everything
STUCK_SECONDS = 600.0  # without progress, the wait at the end stops; a large model may take minutes
FAILURE_SECONDS = 2.0  # between two looks for a failure
OTHERS_SECONDS = 10.0  # that the end waits for other trackers once MLflow has everything
STOP_SECONDS = 3.0  # after SIGTERM


class Publisher:
    """An uploader process. Any thread may call its methods.

    A sweep has one for its own journal and, after follow(), for those of its jobs: importing MLflow takes 2 to 4 s, and
    writers of one sqlite file wait for each other. It is a process because storing 1,000 points holds the interpreter
    for 75 ms, and it has its own session, so Ctrl-C does not reach it. When the training is killed, the pipe closes: the
    uploader sends the rest of the journal, sets the run's status, and ends.

    Each tracker of another package has a process of this kind, too, so that none waits for another one.
    """

    def __init__(
        self,
        folder: Path,
        process: subprocess.Popen[bytes] | None,
        *,
        tracker: str = "",
        others: Sequence[Publisher] = (),
    ) -> None:
        """Use Publisher.start(). tracker: "" for MLflow. others: Those of other trackers."""
        self._folder, self._process, self._tracker, self._others = folder, process, tracker, others
        self._folders = {folder}  # of all followed runs
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the last one was said
        self._has_left = False
        self._has_failed, self._look_again_at = False, 0.0  # see first_failure()
        self._seen: dict[Path, float] = {}  # when each run's acknowledgement was written
        # it writes to the pipe, which may be full, and waits for the end of the process
        self._thread = threading.Thread(target=self._talk, name="runner-publisher", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        folder: Path,
        uri: str,
        *,
        grace_seconds: float = 10.0,
        ahead: Ahead | None = None,
        trackers: Sequence[str] = (),
    ) -> Publisher:
        """Start the processes; returns at once (about 2 ms each). Never raises: a run continues without its tracker.

        Args:
            grace_seconds: How long it retries after the end of the training.
            ahead: Has the process if it is started already.
            trackers: The names of other trackers.
        """
        folder, ahead = folder.absolute(), ahead or Ahead(uri)
        try:
            (folder / LOG).parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            ahead.close()
        others = [cls(folder, Ahead(uri, tracker=name).taken(), tracker=name) for name in trackers]
        for other in others:
            other._say(str(folder), uri, grace_seconds)
        publisher = cls(folder, ahead.taken(), others=others)
        # through the pipe: the URI may contain a password, and `ps` shows arguments
        publisher._say(str(folder), uri, grace_seconds)
        return publisher

    def follow(self, folder: Path) -> None:
        """Send this run's journal, too; it may not exist yet. Never waits, never raises."""
        folder = folder.absolute()
        for each in (self, *self._others):
            each._folders.add(folder)
            each._say(FOLLOW, str(folder))

    def gone(self, folder: Path) -> None:
        """Report that the run's process has ended: a run without an end is then marked as killed.

        Never waits, never raises. finish() reports it for all runs.
        """
        for each in (self, *self._others):
            each._say(GONE, str(folder.absolute()))

    def ack(self) -> Ack:
        """Return how much the store has, and an error if there is one."""
        return self.ack_of(self._folder)

    def ack_of(self, folder: Path) -> Ack:
        """Return the same for a followed run."""
        ack, error = read_ack(folder, self._tracker), self._error()
        return ack if error is None else dataclasses.replace(ack, error=ack.error or error)

    def first_failure(self) -> str | None:
        """Return the first error that prevents sending, once for each tracker; else None.

        Cheap: reads files every two seconds.
        """
        for other in self._others:
            if (failure := other.first_failure()) is not None:
                return failure
        if self._has_failed or time.monotonic() < self._look_again_at:
            return None
        self._look_again_at = time.monotonic() + FAILURE_SECONDS
        written = {folder: self._written_at(folder) for folder in tuple(self._folders)}
        changed = [folder for folder, at in written.items() if at != self._seen.get(folder, -1.0)]
        self._seen = written
        errors = [*(read_error(folder, self._tracker) for folder in changed), self._error()]
        failure = next((error for error in errors if error is not None and not error.startswith("parent ")), None)
        self._has_failed = failure is not None
        return failure

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

        Another tracker that is still sending OTHERS_SECONDS later continues in the background.

        Args:
            grace_seconds: Replaces the value of start().
            within: Seconds to wait at most; the process then continues alone.
            keeps_waiting: Called about once a second; False ends the wait, as `within` does.

        Raises:
            KeyboardInterrupt: At once; the process continues until its grace time ends.
        """
        for each in (self, *self._others):
            each._say_goodbye(grace_seconds)
        last, seen = time.monotonic(), -1.0
        deadline = last + within
        while self._process is not None and (now := time.monotonic()) < deadline:
            if now - last > STUCK_SECONDS or not keeps_waiting() or self._ends_within(min(1.0, deadline - now)):
                break
            if (written := max(map(self._written_at, self._folders))) != seen:
                last, seen = time.monotonic(), written
        deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        for other in self._others:
            other.finish(within=max(0.0, deadline - time.monotonic()), keeps_waiting=keeps_waiting)
        return self.ack()

    def unfinished_trackers(self) -> Iterator[str]:
        """Yield a sentence for each other tracker that does not have everything of the first run."""
        for other in self._others:
            if not (ack := other.ack()).is_complete:
                why = ack.error or f"tracker {other._tracker} is still sending"
                yield f"{why}; `python -m runner sync` sends what is left"

    def stop(self) -> None:
        """End the process now, so that `sync` can send the rest. Points that are sent twice are stored once."""
        for other in self._others:
            other.stop()
        if self._process is not None:
            self._lines.put(None)  # a wait for more lines would not end
            self._process.terminate()
            self._ends_within(STOP_SECONDS)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        """After an error: end the process if no run has started, else let it send the rest."""
        for other in self._others:
            other.__exit__()
        self._say_goodbye(None)
        has_begun = any(has_records(folder / JOURNAL) for folder in self._folders)
        if self._process is not None and self._process.poll() is None and not has_begun:
            self._process.terminate()
            self._ends_within(None)

    def _ends_within(self, seconds: float | None) -> bool:
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self._thread.join()
        return True

    def _error(self) -> str | None:
        code = None if self._process is None else self._process.poll()
        if self._process is None:
            return "the uploader could not be started"
        if code in (None, 0, NOT_DELIVERED):
            return None
        return f"the uploader ended with exit code {code}; {self._folder / named_for(LOG, self._tracker)} says more"

    def _say(self, *words: object) -> None:
        self._lines.put(line_of(*words))

    def _say_goodbye(self, grace_seconds: float | None) -> None:
        if not self._has_left:
            self._has_left = True
            self._say(BYE, grace_seconds)
            self._lines.put(None)

    def _talk(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):  # a broken pipe: ack() reports the exit code
            while (line := self._lines.get()) is not None:
                while line:
                    line = line[process.stdin.write(line) :]
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait()

    def _written_at(self, folder: Path) -> float:
        try:
            return (folder / named_for(ACK, self._tracker)).stat().st_mtime
        except OSError:
            return -1.0
