"""Send a run's journal to a tracker, in one process at a time: turn by turn in the uploader, completely for `sync` and `register`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from runner.tracking.ack import Ack, named_for, read_ack
from runner.tracking.journal import is_being_written
from runner.tracking.journal_records import FILE, has_records
from runner.tracking.mlflow_model import Build
from runner.tracking.mlflow_store import settings
from runner.tracking.trackers import TrackerUploader
from runner.tracking.uploader import Uploader

LOCK = "journal/publish.lock"  # in a run directory: one process sends a journal at a time

LOOK_SECONDS = 0.5  # between two looks at a journal
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0  # after a failure
POSTPONED_SECONDS = 30.0  # between two attempts to send files that failed
LOCKED_SECONDS = 0.2  # between two attempts to take the lock
PREDECESSOR_SECONDS = 30.0  # the uploader of an interrupted run may still be sending when the run is resumed
LINGERING_SECONDS = 8.0  # workers of a killed process hold its journal until they check for their parent, every 5 s

log = logging.getLogger("runner.tracking")


class Backoff:
    """Pauses that double from one failed attempt to the next, up to five seconds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Note a success."""
        self._pause, self._last = FIRST_PAUSE_SECONDS, time.monotonic()

    def pause_seconds(self) -> float:
        """Return the next pause, twice as long each time."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return pause

    def silent_seconds(self, *, since: float = 0.0) -> float:
        """Return the seconds since the last success, or since `since` (of time.monotonic()) if that is later."""
        return time.monotonic() - max(self._last, since)


class Turn(enum.Enum):
    """The result of a turn."""

    IDLE = "nothing to send now"
    MORE = "more to send"
    DONE = "the run has ended and the store has all of it"
    LOCKED = "another process is sending this run"
    FAILED = "the store or the journal failed"


class FollowedRun:
    """One run that is being sent. It takes the lock when there is something to send, and holds it until release().

    Args:
        uploader_of: Makes the Uploader, from the directory and whether the run is running.
        tracker: The name of the tracker; "" for MLflow.
        lingering_seconds: How long an ended run's journal may be held before another process is taken to continue it.
    """

    def __init__(
        self,
        folder: Path,
        uploader_of: Callable[[Path, bool], Uploader | TrackerUploader],
        *,
        tracker: str = "",
        lingering_seconds: float = LINGERING_SECONDS,
    ) -> None:
        self.folder, self._uploader_of, self._lingering_seconds = folder, uploader_of, lingering_seconds
        self.is_gone = False  # its process has ended: nothing more will be written
        self.has_begun = False  # the store has the run, or there is nothing to send
        self.has_only_files = False  # the last turn left only files
        self.failure: Exception | None = None  # an unexpected error of the last turn
        self.has_waited = False  # after end(), a turn has left nothing to send now, or failed
        self.has_worked = False  # the last turn sent something
        self.due_at = time.monotonic()  # when it is next looked at
        self._uploader: Uploader | TrackerUploader | None = None
        self._lock = FileLock(folder / named_for(LOCK, tracker), thread_local=False)
        self._backoff = Backoff()
        self._postponed_at = time.monotonic() + POSTPONED_SECONDS
        self._locked_since: float | None = None
        self._gone_at = 0.0  # of time.monotonic()
        self._knew_end = False  # whether the last turn began after end()

    @property
    def waits_for_predecessor(self) -> bool:
        """Whether another process has the lock, and may release it soon."""
        return self._locked_since is not None and time.monotonic() - self._locked_since < PREDECESSOR_SECONDS

    @property
    def waits_for_parent(self) -> bool:
        """Whether everything is sent except the link to a parent that is not in the store yet."""
        return self._uploader is not None and self._uploader.only_waits_for_parent()

    def turn(self) -> Turn:
        """Send up to 1,000 points, an event or a file. Never raises.

        Called in another thread; a concurrent end() takes effect at the next turn.
        """
        before = self._reached()
        try:
            result, self.failure = self._send(), None
        except Exception as error:
            result, self.failure = Turn.FAILED, error
        self.has_worked = result is Turn.DONE or self._reached() != before
        if self.has_worked or result is Turn.IDLE:
            self._backoff.reset()
        return result

    def schedule(self, result: Turn, *, longest_seconds: float) -> None:
        """Set when the next turn is due: later after each failure. An ended run with more to send keeps its place."""
        now, self.has_waited = time.monotonic(), self._knew_end and result is not Turn.MORE
        if self.is_gone and not self._knew_end:
            self.due_at = now
        elif result is Turn.MORE:
            self.due_at = self.due_at if self.is_gone else now
        elif result is Turn.FAILED:
            self.due_at = now + min(longest_seconds, self._backoff.pause_seconds())
        else:
            self.due_at = now + (LOCKED_SECONDS if result is Turn.LOCKED else LOOK_SECONDS)

    def end(self) -> None:
        """Note that the run's process has ended; the next turn is due at once."""
        if not self.is_gone:
            self.is_gone, self.due_at, self._gone_at = True, time.monotonic(), time.monotonic()

    def sample(self) -> None:
        """Measure the machine, if it is time to; the next turn sends the values."""
        if (uploader := self._uploader) is not None and not self.is_gone:
            uploader.sample(sends=False)

    def is_complete(self) -> bool:
        """Return whether the store has everything, by the journal and its acknowledgement."""
        if self._uploader is None:
            return not _may_have_records(self.folder)
        return self._uploader.ack.is_complete and not self._uploader.has_more()

    def note_outage(self, error: str) -> None:
        """Write the reason of an outage to the run's ack.json."""
        with contextlib.suppress(OSError):
            if self._open() is None and self._uploader is not None:
                self._uploader.note_outage(error)

    def report_left(self) -> None:
        """Log why nothing was sent."""
        if self._locked_since is not None:
            log.error("%s: another process is sending this run: nothing was sent from here", self.folder)

    def release(self) -> None:
        """Release the lock and the Uploader."""
        self._uploader = None
        self._lock.release()

    def _send(self) -> Turn:
        is_gone = self._knew_end = self.is_gone  # read before sending: a run that ends later may still write
        if (waits := self._open()) is not None or (uploader := self._uploader) is None:
            self.has_begun |= waits is Turn.IDLE
            return Turn.DONE if is_gone and waits is Turn.IDLE else waits or Turn.IDLE
        sent = uploader.attempt(postponed=self._retries_postponed(), most=1)
        self.has_begun = uploader.ack.has_begun
        self.has_only_files = sent and not uploader.has_records()
        if sent and uploader.has_more():
            return Turn.MORE
        if not is_gone or not (sent or uploader.only_waits()):
            return Turn.IDLE if sent else Turn.FAILED
        if uploader.ack.ended or not is_being_written(self.folder):
            sent &= uploader.abandon()
        elif time.monotonic() - self._gone_at < self._lingering_seconds:
            return Turn.IDLE
        else:  # another process continues the run
            uploader.leave()
        return Turn.DONE if sent else Turn.FAILED

    def _open(self) -> Turn | None:
        """Take the lock and make the Uploader. Returns None, or why there is nothing to do."""
        if self._uploader is not None:
            return None
        if not _may_have_records(self.folder):  # don't create a store for an empty journal
            return Turn.IDLE
        if not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                self._locked_since = self._locked_since or time.monotonic()
                return Turn.LOCKED
            self._locked_since = None
        self._uploader = self._uploader_of(self.folder, not self.is_gone)
        return None

    def _retries_postponed(self) -> bool:
        if time.monotonic() > self._postponed_at:
            self._postponed_at = time.monotonic() + POSTPONED_SECONDS
            return True
        return self.is_gone

    def _reached(self) -> object:
        ack = self._uploader.ack if self._uploader is not None else Ack()
        return ack.offset, len(ack.postponed), ack.died


def _may_have_records(folder: Path) -> bool:
    """Return whether a run has something to send; the attempt to send reports an error of the disk."""
    try:
        return has_records(folder / FILE)
    except OSError:
        return True


def sync(folder: Path, uri: str, *, tracker: str = "", grace_seconds: float = 10.0, build: Build | None = None) -> Ack:
    """Send what is missing; imports MLflow (1 s). A run whose process was killed gets the status KILLED.

    Args:
        uri: MLflow's store.
        tracker: The tracker that gets the journal instead of MLflow.
        grace_seconds: How long to retry a store that does not answer; the Ack's `error` then has the reason.

    Raises:
        OSError: And other unexpected errors.
    """

    def uploader_of(folder: Path, _: bool) -> Uploader | TrackerUploader:
        return TrackerUploader(folder, tracker) if tracker else Uploader(folder, uri, build=build)

    run = FollowedRun(folder, uploader_of, tracker=tracker, lingering_seconds=0.0)
    run.end()
    backoff = Backoff()
    try:
        with contextlib.nullcontext() if tracker else settings():
            while (result := run.turn()) is not Turn.DONE and not run.waits_for_parent:
                if result is Turn.LOCKED:
                    error = "another process is sending this run at this moment"
                    return dataclasses.replace(read_ack(folder, tracker), error=error)
                if run.failure is not None:
                    raise run.failure
                if run.has_worked:
                    backoff.reset()
                elif result is Turn.MORE:  # the next file, after one that failed
                    continue
                elif backoff.silent_seconds() > grace_seconds:
                    break
                else:
                    time.sleep(backoff.pause_seconds())
        return read_ack(folder, tracker)
    finally:
        run.release()


def find_journals(root: Path) -> list[Path]:
    """Return the directories of all runs with a journal at or below `root`, sorted by name, i.e., by date."""
    return sorted(path.parent.parent for path in root.rglob(FILE))
