"""An error that ended a training goes in; the record's status, its words and what to do come out."""

from __future__ import annotations

import errno
import logging
import traceback
from pathlib import Path

from runner.errors import RunnerError
from runner.metrics import NotFiniteError
from runner.record import Record
from runner.tracking.journal import DeletedError
from runner.watch.meetings import PlacementError

log = logging.getLogger("runner")


def fail(record: Record, error: BaseException) -> None:
    """Makes an error the record's. Raises: what is not an Exception."""
    if isinstance(error, KeyboardInterrupt):
        record.status, record.error = "killed", "interrupted"
        return
    record.status = "failed"
    if isinstance(error, NotFiniteError):
        record.error = f"{error}; try a smaller optimizer.lr, train.clip_grad_norm=1, or look at the data of that step"
        return
    if isinstance(error, RunnerError):  # of a part that finds out late that it does not suit
        record.error = "; ".join(f"{fault.asked}: {fault.so}; write: {fault.write}" for fault in error.faults)
        log.error("the run failed: %s", record.error)
        return
    if isinstance(error, PlacementError):
        record.error = str(error)
        log.error("tensors on two devices met", exc_info=error)
        return
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        record.ending = "disk_full"
        record.error = f"the disk is full ({error}); what was saved before is there: make room and resume"
        return
    if isinstance(error, DeletedError):
        record.ending, record.error = "deleted", str(error)
        return
    where = traceback.extract_tb(error.__traceback__)[-1]
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(Path.cwd())
    ]
    where = own[-1] if own else where
    record.error = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    log.error("the run failed", exc_info=error)
    if not isinstance(error, Exception):
        raise error  # SystemExit and the like are not ours to keep
