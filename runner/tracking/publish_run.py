"""One run in the publishing process: one sending a turn, so that many runs share the process.

It holds the run's lock while it sends, and keeps its uploader and its own pauses.
"""

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
PREDECESSOR_SECONDS = 30.0  # the process of an interrupted run may still be at its end when the run goes on
LINGERING_SECONDS = 8.0  # what a killed process has forked may hold its journal: a data loader's workers look each 5 s
LOCKED_SECONDS = 0.2  # from one try for the lock to the next

log = logging.getLogger("runner.tracking")


class Went(enum.Enum):
    """How a turn went."""

    QUIET = "there is nothing more to send at present"
    MORE = "there is more to send"
    OVER = "the run is gone and the store has all of it"
    LOCKED = "another process is sending this run"
    FAILED = "something stands in the way"


class PublishedRun:
    """One run while it is published: its lock, its uploader, its own pauses.

    The lock is taken when there is something to send, and held until let_go(): `sync` relies on it.
    upload: makes the uploader, once the lock is had; told whether the run lives.
    """

    def __init__(self, folder: Path, upload: Callable[[Path, bool], Uploader]) -> None:
        self.folder = folder
        self.is_gone = False  # its process is over: nothing more will be written
        self.has_begun = False  # the store has the run, or there is nothing to send
        self.has_only_files = False  # the last turn left nothing but files
        self.is_broken = False  # the last turn ended in an unexpected error
        self.has_worked = False  # the last turn got something through
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
        """Whether it has failed, and it is not yet time to try again."""
        return time.monotonic() < self._again_at

    @property
    def pause_seconds(self) -> float:
        """How long it still pauses."""
        return max(0.0, self._again_at - time.monotonic())

    @property
    def waits_for_predecessor(self) -> bool:
        """Whether another process has the run, and may still be expected to let it go soon."""
        return self._locked_since is not None and time.monotonic() - self._locked_since < PREDECESSOR_SECONDS

    def turn(self) -> Went:
        """Send one thing, up to 1,000 points; retry what has failed when it is time to. Never raises.

        Called in a separate thread; end() may be called at the same time, and counts from the next turn on.
        """
        before = self._reached()
        try:
            went = self._turn()
            self.is_broken = False
        except Exception:
            went = Went.FAILED
            if not self.is_broken:  # told of once
                log.exception("%s: this should not happen", self.folder)
            self.is_broken = True
        self.has_worked = went is Went.OVER or self._reached() != before
        if self.has_worked or went is Went.QUIET:
            self._patience.worked()
        return went

    def pause(self, seconds: float | None = None) -> None:
        """It has failed by itself: its next turn is later. seconds: None: later each time, but soon while it is locked."""
        if seconds is None:
            seconds = LOCKED_SECONDS if self._locked_since is not None else self._patience.pause_seconds()
        self._again_at = time.monotonic() + seconds

    def end(self) -> None:
        """The run's process is over: it gets a turn at once."""
        if not self.is_gone:
            self.is_gone, self._again_at, self._gone_at = True, 0.0, time.monotonic()

    def sample(self) -> None:
        """Measure the machine for it, if it is time to; its next turn sends that."""
        if (uploader := self._uploader) is not None and not self.is_gone:
            uploader.sample(sends=False)

    def is_complete(self) -> bool:
        """Whether nothing of it is missing in the store; asks the journal and not the store."""
        if self._uploader is None:
            return not has_records(self.folder / FILE)
        return self._uploader.ack.is_complete and not self._uploader.has_more()

    def note_outage(self, error: str) -> None:
        """Writes down what keeps the store from answering; who asks for this run's ack is told."""
        with contextlib.suppress(OSError):
            if self._has_run() and self._takes_lock():
                self._opened().note_outage(error)

    def say_what_is_left(self) -> None:
        """One line in the log."""
        if self._locked_since is not None:
            log.error("%s: another process is sending this run: nothing was sent from here", self.folder)

    def let_go(self) -> None:
        """Frees the lock and the memory."""
        self._uploader = None
        self._lock.release()

    def _turn(self) -> Went:
        is_gone = self.is_gone  # a run that ends from here on may write its last words while this sends
        if not self._has_run():  # before that no store is opened, or made
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
        except Exception:  # what can't be read is told of by the attempt to send it
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
