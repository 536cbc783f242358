"""Describe the damage in a journal, for `sync`, resumed runs and the uploader's log."""

from __future__ import annotations

from pathlib import Path

from runner.tracking.ack import read_ack
from runner.tracking.journal_frames import Gap, Survey, survey
from runner.tracking.journal_records import FILE


def find_damage(folder: Path) -> list[str]:
    """Return a sentence for each damage; [] without a journal. Reads all of it, about 1 s for 1 GB."""
    path = folder / FILE
    return describe(survey(path), offset=read_ack(folder).offset) if path.is_file() else []


def describe(found: Survey, *, offset: int) -> list[str]:
    """Return the same for a journal that has been read. offset: of the first record that MLflow does not have."""
    if found.is_foreign:
        return ["its journal.bin is not the journal of a run, and is not read"]
    sentences = [describe_gap(gap) for gap in found.gaps]
    if found.tail.num_bytes:
        lost = "the journal's last record is incomplete or damaged, and lost"
        sentences.append(f"{lost} ({found.tail.num_bytes:,} bytes from byte {found.tail.offset:,} on)")
    if offset > found.tail.end:
        sentences.append(f"the journal has lost its end: MLflow has {offset:,} bytes of it, and {found.end:,} are left")
    return sentences


def describe_gap(gap: Gap) -> str:
    where = f"{gap.num_bytes:,} bytes from byte {gap.offset:,} on"
    return f"the journal is damaged ({where}): these records are lost, those after them are not"
