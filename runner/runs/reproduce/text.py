"""Puts differences and comparisons in words, and writes reproduce.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.runs.reproduce.compare import CLOSE, DIFFERENT, NOT_COMPARED, Comparison, earliest, is_reproduced, overall
from runner.runs.reproduce.making import Difference
from runner.runs.reproduce.recorded import Original

FILE = "reproduce.json"
HEAD = ("metric", "points", "verdict", "largest relative difference", "first at step")


def said_first(
    original: Original, making: Sequence[Difference], values: Sequence[Difference], *, code_lines: str
) -> list[str]:
    """What is said before the run: what is repeated, and what is not as it was."""
    of = f" of {original.num_steps:,}" if original.num_steps and not original.is_whole else ""
    found = [f"repeat: {original.name} ({original.status}, {original.last_step:,}{of} steps)"]
    if making:
        found += ["warning: what it is made with is not the same, and its numbers may not be", *_side_by_side(making)]
        if code_lines:
            found += ["        its code was changed after that commit; to have it:", f"        {code_lines}"]
    else:
        found.append("made:   with the same code, versions and device" + _of_code(original))
    if values:
        found += ["changed: its configuration", *_side_by_side(values)]
    return [_printable(line) for line in found]


def table(found: Sequence[Comparison]) -> list[str]:
    """A line for each metric, below a head."""
    rows = [HEAD, *(_row(each) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return [
        _printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]


def sentence(found: list[Comparison], *, failure: str = "", ends: tuple[int, int] = (0, 0)) -> str:
    """The verdict. failure: how this run failed where the other had not; ends: the last step of each of the two."""
    if failure:
        return f"NOT reproduced: {failure}"
    if is_reproduced(found):
        count = sum(each.num_common for each in found)
        compared = f"{_of(count, 'point')} of {_of(sum(each.num_common > 0 for each in found), 'metric')}"
        if ends[0] != ends[1]:
            compared += f", up to step {min(ends):,}: it ended at {ends[0]:,} then, and at {ends[1]:,} now"
        largest = max(found, key=lambda each: each.largest)
        if not largest.largest:
            return f"reproduced to the bit ({compared})"
        where = f"the largest difference is {largest.largest:.1e}, of {largest.name} at step {largest.largest_step}"
        return f"reproduced {CLOSE} ({compared}; {where})"
    first = earliest(found)
    if first is None:
        return "NOT reproduced: the two have no point in common"
    others = sum(each.verdict == DIFFERENT for each in found) - 1
    more = f"; so do {others} more" if others > 1 else "; so does one more" if others else ""
    return f"NOT reproduced: {_printable(first.name)} {_departure(first)}{more}"


def write(
    folder: Path,
    original: Original,
    found: list[Comparison],
    differences: Sequence[Difference],
    *,
    said: str,
    same: bool,
) -> None:
    """reproduce.json: all that was said, for programs. Numbers that JSON has not are texts there."""
    content = {
        "reproduces": {"name": original.name, "run_id": original.run_id, "status": original.status},
        "reproduced": same,
        "verdict": overall(found) if same else DIFFERENT,
        "sentence": said,
        "differences": [
            dict(zip(("what", "was", "now"), (each.what, *each.values), strict=True)) for each in differences
        ],
        "metrics": {
            each.name: {key: _jsonable(value) for key, value in vars(each).items() if key != "name"} for each in found
        },
    }
    (folder / FILE).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _departure(first: Comparison) -> str:
    if first.then is None or first.now is None:
        if not first.num_common:
            return "is missing"
        had = first.num_common + first.num_missing
        return f"has {_of(first.num_common + first.num_additional, 'point')}, and had {had:,}"
    return f"differs from step {first.first_step} on ({first.then:.9g} then, {first.now:.9g} now)"


def _row(each: Comparison) -> tuple[str, ...]:
    points = f"{each.num_common:,}"
    points += f", {each.num_missing:,} missing" if each.num_missing else ""
    points += f", {each.num_additional:,} more" if each.num_additional else ""
    largest = f"{each.largest:.1e}" if each.largest else "0" if each.num_common else ""
    first = str(each.first_step) if each.first_step is not None and each.verdict != NOT_COMPARED else ""
    return each.name, points, each.verdict, largest, first


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _side_by_side(differences: Sequence[Difference]) -> list[str]:
    rows = [("", "was", "is"), *((each.what, *each.values) for each in differences)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"        {what:<{widths[0]}}  {was:<{widths[1]}}  {now}" for what, was, now in rows]


def _of_code(original: Original) -> str:
    if "git_commit" not in original.tags:
        return ", as far as is known: its folder was in no git repository"
    return ", uncommitted changes too" if original.tags.get("git_dirty") == "true" else ""


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
