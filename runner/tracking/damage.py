"""What is damaged in a journal, in words for a person: for `sync`, for a run that goes on, and for the publishing process's log.

It reads and keeps nothing.
"""

from __future__ import annotations

from pathlib import Path

from runner.tracking.ack import read_ack
from runner.tracking.journal_frames import Gap, Survey, survey
from runner.tracking.journal_records import FILE


def find_damage(folder: Path) -> list[str]:
    """A sentence for each thing that is wrong; [] for a sound journal and for none. Reads all of it, about 1 s for 1 GB."""
    path = folder / FILE
    return describe(survey(path), offset=read_ack(folder).offset) if path.is_file() else []


def describe(found: Survey, *, offset: int) -> list[str]:
    """The same for a journal that has been read. offset: of the first record that MLflow has not got."""
    if found.is_foreign:
        return ["its journal.bin is no journal of a run: nothing of it is read"]
    said = [describe_gap(gap) for gap in found.gaps]
    if found.tail.num_bytes:
        what = "the journal's last record was cut short, or is damaged: it is lost"
        said.append(f"{what} ({found.tail.num_bytes:,} bytes from byte {found.tail.offset:,} on)")
    if offset > found.tail.end:
        said.append(f"the journal has lost its end: MLflow has had {offset:,} bytes of it, and it holds {found.end:,}")
    return said


def describe_gap(gap: Gap) -> str:
    where = f"{gap.num_bytes:,} bytes from byte {gap.offset:,} on"
    return f"the journal is damaged ({where}): what they held is lost, what follows them is not"
