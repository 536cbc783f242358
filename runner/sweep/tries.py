"""Decides, a few seeds at a time, whether a configuration is better than the one it is tried against; keeps a ledger of such tries.

For `try` (tools/try_out.py), whose runs are trying.py's. look() is pure; the ledger is one JSON line a try.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.experiment.provenance import TRIES
from runner.sweep.report.ranking import Goal
from runner.sweep.report.significance import ALPHA, Difference, difference

#: below the current folder: the ledger, and a folder for each try with its sweep
FOLDER = TRIES
LEDGER = FOLDER / "tries.jsonl"
#: seeds of both that are looked at; at the first number a try can be given up, and is not kept yet
LOOKS = (4, 12, 24, 48)
#: how often a try is called better or worse where it is neither, over all its looks: it is kept half as often, one in 400
ALPHA_OF_A_TRY = 0.005
#: as significance.difference() takes it
NUM_COMPARISONS = round(ALPHA / ALPHA_OF_A_TRY * (len(LOOKS) - 1))
#: pairs that must all have one sign for so small a chance: fewer keep nothing
LEAST = 11
KEPT, DISCARDED, UNDECIDED = "kept", "discarded", "undecided"

Values = Mapping[int, float]  # by seed


@dataclass(frozen=True)
class Decision:
    """What became of a try, why, and the values of the seeds that both sides have."""

    verdict: str
    why: str
    values: Values
    against: Values
    difference: Difference | None = None


def look(
    goal: Goal,
    seeds: Sequence[int],
    ours: Values,
    theirs: Values,
    *,
    lost: Collection[int] = (),
    is_over: bool = False,
) -> Decision | list[int]:
    """A decision; or the seeds that both sides need for the next look. is_over: there will be no other.

    seeds: that there may be, in their order. lost: those among them with which a run has failed; others are asked for instead.
    A try is kept only where the comparison of `compare` says better, at a level at which few are kept by luck. It is given
    up as soon as it does not look better: where that is an error, it costs this try alone.
    """
    seeds = [seed for seed in seeds if seed not in lost]
    shared = [seed for seed in seeds if seed in ours and seed in theirs]
    a, b = {seed: ours[seed] for seed in shared}, {seed: theirs[seed] for seed in shared}
    most = min(len(seeds), LOOKS[-1])
    sizes = [*(size for size in LOOKS if size < most), most]
    wanted = next((size for size in sizes if size > len(shared)), None)
    if len(shared) not in sizes and not is_over and wanted is not None:
        return seeds[:wanted]
    verdict, why = _judged(a, b, goal.mode)
    if verdict == UNDECIDED and wanted is not None and not is_over:
        return seeds[:wanted]
    apart = difference(a, b, num_comparisons=NUM_COMPARISONS)
    return Decision(verdict, why or _left_open(apart, len(shared), most), a, b, apart)


def _judged(ours: Values, theirs: Values, mode: str) -> tuple[str, str]:
    n = len(ours)
    gains = [(ours[seed] - theirs[seed]) * (1 if mode == "max" else -1) for seed in ours]
    if n < LOOKS[0]:
        return UNDECIDED, ""
    if not any(gains):
        return DISCARDED, f"the same values, to the bit, with {n} seeds"
    if max(gains) <= 0:
        return DISCARDED, f"better with none of {n} seeds"
    if n < LEAST:
        return UNDECIDED, ""
    if sum(gains) <= 0:
        return DISCARDED, f"no better, over {n} seeds"
    apart = difference(ours, theirs, num_comparisons=NUM_COMPARISONS)
    is_better = apart is not None and apart.is_decided
    return (KEPT, f"better, over {n} seeds") if is_better else (UNDECIDED, "")


def _left_open(apart: Difference | None, n: int, most: int) -> str:
    if n >= most:
        more = f": about {apart.more_seeds:,} more would" if apart is not None and apart.more_seeds else ""
        return f"{n} seeds do not tell{more}"
    return f"the time was up after {n} seeds of both" + (f"; fewer than {LEAST} keep nothing" if n < LEAST else "")


def read(file: Path) -> list[dict[str, Any]]:
    """The tries, in their order; a line that a kill tore off counts as not written."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def write(file: Path, line: Mapping[str, Any]) -> None:
    """Adds one try; it is on the disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)  # a kill may have torn off the last one
        stream.write(json.dumps(line).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def best(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last one that was kept."""
    return next((line for line in reversed(lines) if line["verdict"] == KEPT), None)


def known_of(name: str, code: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """What tries have measured of what they were tried against, by seed. name: `try N`, or a run's folder; code: its own."""
    found: dict[int, float] = {}
    for line in lines:
        if line["against"]["name"] == name and line["against"]["code"] == code:
            found |= by_seed(line["against"]["values"])
    return found


def by_seed(values: Mapping[str, float]) -> dict[int, float]:
    """As JSON has them, with numbers for keys."""
    return {int(seed): value for seed, value in values.items()}
