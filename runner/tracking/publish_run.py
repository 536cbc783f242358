"""One run in the uploader process: its lock, its Uploader and its pauses. It sends one batch per turn."""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from runner.tracking.ack import Ack
from runner.tracking.backoff import Backoff
from runner.tracking.journal import is_being_written
from runner.tracking.journal_records import FILE, has_records
from runner.tracking.sync import LOCK
from runner.tracking.uploader import Uploader

POSTPONED_SECONDS = 30.0
PREDECESSOR_SECONDS = 30.0  # the uploader of an interrupted run may still be sending when the run is resumed
LINGERING_SECONDS = 8.0  # workers of a killed process hold its journal until they check for their parent, every 5 s
LOCKED_SECONDS = 0.2  # between two attempts to take the lock

log = logging.getLogger("runner.tracking")


class Went(enum.Enum):
    """The result of a turn."""

    QUIET = "nothing to send now"
    MORE = "more to send"
    OVER = "the run has ended and the store has all of it"
    LOCKED = "another process is sending this run"
    FAILED = "the store or the journal failed"


class PublishedRun:
    """One run that is being sent. It takes the lock when there is something to send, and holds it until let_go().

    Args:
        upload: Makes the Uploader, from the directory and whether the run is running.
    """

    def __init__(self, folder: Path, upload: Callable[[Path, bool], Uploader]) -> None:
        self.folder = folder
        self.is_gone = False  # its process has ended: nothing more will be written
        self.has_begun = False  # the store has the run, or there is nothing to send
        self.has_only_files = False  # the last turn left only files
        self.is_broken = False  # the last turn ended with an unexpected error
        self.has_worked = False  # the last turn sent something
        self._upload = upload
        self._uploader: Uploader | None = None
        self._lock = FileLock(folder / LOCK, thread_local=False)
        self._patience = Backoff()
        self._again_at = 0.0
        self._postponed_at = time.monotonic() + POSTPONED_SECONDS
        self._locked_since: float | None = None
        self._gone_at = 0.0  # of time.monotonic()

    @property
    def is_pausing(self) -> bool:
        """Whether it waits after a failure."""
        return time.monotonic() < self._again_at

    @property
    def pause_seconds(self) -> float:
        """The rest of the pause."""
        return max(0.0, self._again_at - time.monotonic())

    @property
    def waits_for_predecessor(self) -> bool:
        """Whether another process has the lock, and may release it soon."""
        return self._locked_since is not None and time.monotonic() - self._locked_since < PREDECESSOR_SECONDS

    def turn(self) -> Went:
        """Send up to 1,000 points, an event or a file. Never raises.

        Called in another thread; a concurrent end() takes effect at the next turn.
        """
        before = self._reached()
        try:
            went = self._turn()
            self.is_broken = False
        except Exception:
            went = Went.FAILED
            if not self.is_broken:  # logged once
                log.exception("%s: unexpected error", self.folder)
            self.is_broken = True
        self.has_worked = went is Went.OVER or self._reached() != before
        if self.has_worked or went is Went.QUIET:
            self._patience.worked()
        return went

    def pause(self, seconds: float | None = None) -> None:
        """Delay the next turn. seconds: None: longer after each failure, short while another process has the lock."""
        if seconds is None:
            seconds = LOCKED_SECONDS if self._locked_since is not None else self._patience.pause_seconds()
        self._again_at = time.monotonic() + seconds

    def end(self) -> None:
        """Note that the run's process has ended; ends a pause."""
        if not self.is_gone:
            self.is_gone, self._again_at, self._gone_at = True, 0.0, time.monotonic()

    def sample(self) -> None:
        """Measure the machine, if it is time to; the next turn sends the values."""
        if (uploader := self._uploader) is not None and not self.is_gone:
            uploader.sample(sends=False)

    def is_complete(self) -> bool:
        """Return whether the store has everything, by the journal and its acknowledgement."""
        if self._uploader is None:
            return not has_records(self.folder / FILE)
        return self._uploader.ack.is_complete and not self._uploader.has_more()

    def note_outage(self, error: str) -> None:
        """Write the reason of an outage to the run's ack.json."""
        with contextlib.suppress(OSError):
            if self._has_run() and self._takes_lock():
                self._opened().note_outage(error)

    def say_what_is_left(self) -> None:
        """Log why nothing was sent."""
        if self._locked_since is not None:
            log.error("%s: another process is sending this run: nothing was sent from here", self.folder)

    def let_go(self) -> None:
        """Release the lock and the Uploader."""
        self._uploader = None
        self._lock.release()

    def _turn(self) -> Went:
        is_gone = self.is_gone  # read before sending: a run that ends later may still write
        if not self._has_run():  # don't create a store for an empty journal
            self.has_begun = True
            return Went.OVER if is_gone else Went.QUIET
        if not self._takes_lock():
            return Went.LOCKED
        uploader = self._opened()
        sent = uploader.attempt(postponed=self._is_time_for_postponed(), most=1)
        self.has_begun = uploader.ack.run_id is not None
        self.has_only_files = sent and not uploader.has_records()
        if sent and uploader.has_more():
            return Went.MORE
        if is_gone and (sent or uploader.only_waits()):
            return self._finished(uploader, sent=sent)
        return Went.QUIET if sent else Went.FAILED

    def _finished(self, uploader: Uploader, *, sent: bool) -> Went:
        if uploader.ack.ended or not is_being_written(self.folder):
            sent &= uploader.abandon()
        elif time.monotonic() - self._gone_at < LINGERING_SECONDS:
            return Went.QUIET
        else:
            uploader.leave()
        return Went.OVER if sent else Went.FAILED

    def _reached(self) -> object:
        ack = self._uploader.ack if self._uploader is not None else Ack()
        return ack.offset, len(ack.postponed), ack.died

    def _has_run(self) -> bool:
        if self._uploader is not None:
            return True
        try:
            return has_records(self.folder / FILE)
        except Exception:  # the attempt to send it reports why it can't be read
            return True

    def _takes_lock(self) -> bool:
        if not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                self._locked_since = self._locked_since or time.monotonic()
                return False
            self._locked_since = None
        return True

    def _opened(self) -> Uploader:
        if self._uploader is None:
            self._uploader = self._upload(self.folder, not self.is_gone)
        return self._uploader

    def _is_time_for_postponed(self) -> bool:
        if time.monotonic() > self._postponed_at:
            self._postponed_at = time.monotonic() + POSTPONED_SECONDS
            return True
        return self.is_gone
