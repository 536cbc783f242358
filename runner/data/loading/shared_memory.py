"""Checks whether /dev/shm has room for the batches that worker processes send.

A process that reads hands its batches over in shared memory. Containers have 64 MiB of it unless they are told otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from runner.data.map_style import STANDARD, Conversion, batch_of
from runner.device.placement import num_bytes, num_rows
from runner.errors import OF_CODE, Problem, RunnerError

PLACE = Path("/dev/shm")
#: batches that each process reads ahead (torch's own default)
PREFETCH = 2
BIGGER = "a larger /dev/shm (docker run --shm-size=8g)"


@dataclass(frozen=True)
class Refused:
    """What a process that reads hands over in a batch's place: torch would send of a RunnerError its words alone."""

    problems: tuple[Problem, ...]


def free_room() -> int | None:
    """Of /dev/shm; None where shared memory does not lie there."""
    if not sys.platform.startswith("linux") or not PLACE.is_dir():
        return None
    found = os.statvfs(PLACE)
    return found.f_bavail * found.f_frsize


def most_workers(free: int, batch_bytes: int, *, prefetch: int = PREFETCH) -> int:
    """Processes for whose batches there is room: `prefetch` of each, and the one that training has."""
    return max(0, (free // max(batch_bytes, 1) - 1) // prefetch)


def bytes_of_a_batch(rows: Any, batch_size: int, conversion: Conversion = STANDARD) -> int:
    """By the first row; 0 where it can't be read, which the reading will tell."""
    if not isinstance(rows, Dataset):
        return num_bytes(rows) * batch_size // max(1, num_rows(rows))
    try:
        several = getattr(rows, "__getitems__", None)
        return num_bytes(conversion(batch_of(rows, several([0]) if several else [rows[0]]))) * batch_size
    except OF_CODE:  # a person's code, which fails where it is asked for batches, and is told there
        return 0


def with_room(workers: int, batch_bytes: int, free: int | None, *, is_asked: bool) -> tuple[int, str]:
    """The processes that may read, and why there are none. is_asked: by the person, who is refused and not overruled.

    free: None where there is no limit that is known. Raises: RunnerError.
    """
    if not workers or free is None or (most := most_workers(free, batch_bytes)) >= workers:
        return workers, ""
    needed = (workers * PREFETCH + 1) * batch_bytes
    room = (
        f"/dev/shm has {free / 2**20:,.1f} MiB free, and batches for {workers} processes take {needed / 2**20:,.1f} MiB"
    )
    if is_asked:
        fewer = f"`data.num_workers={most}`, " if most else ""
        fix = f"use {fewer}`data.num_workers=0`, a smaller `train.batch_size`, or {BIGGER}"
        raise RunnerError.of(f"data.num_workers={workers}", room, fix)
    return most, f"; read by {most} processes: {room}" if most else f"; read in this process: {room}"


def told(batches: Iterator[Any], workers: int) -> Iterator[Any]:
    """The batches; where the processes find faults, or no room in the midst of it, that is told. Raises: RunnerError."""
    try:
        for batch in batches:
            if isinstance(batch, Refused):
                raise RunnerError(*batch.problems)
            yield batch
    except (RuntimeError, RunnerError) as error:  # torch's own, or where rows became no batch for want of it
        if not workers or "shared memory" not in str(error):
            raise
        problem = f"the loading processes found no space in /dev/shm: {(free_room() or 0) / 2**20:,.1f} MiB are free"
        fix = f"use `data.num_workers=0` or fewer of them, a smaller `train.batch_size`, or {BIGGER}"
        raise RunnerError.of(f"data.num_workers={workers}", problem, fix) from error
