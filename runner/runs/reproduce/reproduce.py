"""`reproduce`: run a configuration again as a new run, compare the metrics, and print what is equal and what differs.

The path: recorded.py, experiment/run.py, compare.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset

from runner.config.identity import chosen
from runner.errors import RunnerError, harmless
from runner.experiment import provenance, run
from runner.experiment.console import Screen
from runner.experiment.context import Repetition, RunContext
from runner.experiment.directory import DIFF, Run
from runner.experiment.reporter import data_digest
from runner.experiment.summary import Summary
from runner.experiment.terminal import aligned
from runner.runs.reproduce import recorded
from runner.runs.reproduce.compare import (
    CLOSE,
    DIFFERENT,
    NOT_COMPARED,
    CurveComparison,
    Points,
    compare_all,
    earliest,
    is_reproduced,
    last_step,
    overall,
)
from runner.runs.reproduce.recorded import RecordedRun, ValueDifference, is_same_code
from runner.tracking.mlflow_names import Names
from runner.training.parts import Parts

FILE = "reproduce.json"
HEAD = ("metric", "points", "verdict", "largest relative difference", "first at step")
#: keys that change where a run ends, and nothing before
LENGTH_KEYS = ("train.num_epochs", "train.num_steps", "train.max_seconds", "train.early_stopping.")


def repeat(
    original: RecordedRun, cfg: DictConfig, folder: Path, *, context: RunContext, anyway: bool
) -> tuple[Summary, bool]:
    """Run the configuration as a new run in `folder`, and compare.

    Returns:
        Its summary, and whether the metrics agree.

    Raises:
        RunnerError: If the data differ and `anyway` is false, or the run can't start.
    """
    if original.store is not None:
        cfg.tracking.uri = original.store  # not the one in a downloaded file
    screen = Screen()
    checked = context.checked
    assert checked is not None  # cli.train.started() has checked the run
    before = recorded.of_run(original)
    made = recorded.differing([before, recorded.of_now(checked.choice, checked.hardware, files=before.notes)])
    values = recorded.of_values([original.chosen(), chosen(cfg)])
    code_lines = restoring_command(original, provenance.git_state())
    for line in lines_before(original, made, values, code_lines=code_lines):
        screen.say(line)
    check_data = data_check(original, anyway=anyway, say=screen.say)
    repetition = Repetition(original.run_id or original.name, check_data)
    summary = run.run(cfg, folder, context=replace(context, repetition=repetition))

    now = _series(folder, spelled=original.store is not None)
    is_other_end = _ends_elsewhere(original, cfg, summary, [each.what for each in values])
    found = compare_all(original.series, now, may_end_elsewhere=is_other_end)
    failure = f"this run failed: {summary.error}" if summary.status == "failed" != original.status else ""
    same = is_reproduced(found) and not failure
    said = sentence(found, failure=failure, ends=(original.last_step, last_step(now)))
    write(folder, original, found, [*made, *values], said=said, same=same)
    for line in ("", *table(found), "", said):
        screen.say(line)
    return summary, same


def _series(folder: Path, *, spelled: bool) -> dict[str, Points]:
    names, series = Names(), Run(folder).points()  # in the order of the journal
    return {names.key(name) if spelled else name: points for name, points in series.items()}


def _ends_elsewhere(original: RecordedRun, cfg: DictConfig, summary: Summary, changed: list[str]) -> bool:
    is_short = not original.is_whole or summary.status != "finished" or cfg.train.max_seconds is not None
    return is_short or any(key.startswith(LENGTH_KEYS) for key in changed)


def lines_before(
    original: RecordedRun, making: Sequence[ValueDifference], values: Sequence[ValueDifference], *, code_lines: str
) -> list[str]:
    """Return the lines before the run: what is repeated, and what changed since."""
    of = f" of {original.num_steps:,}" if original.num_steps and not original.is_whole else ""
    found = [f"repeat: {original.name} ({original.status}, {original.last_step:,}{of} steps)"]
    if making:
        found += ["warning: the run was made with something else, so its numbers may differ", *_side_by_side(making)]
        if code_lines:
            found += ["        its code was changed after that commit; to restore it:", f"        {code_lines}"]
    else:
        found.append("made:   with the same code, versions and device" + _of_code(original))
    if values:
        found += ["changed: the configuration", *_side_by_side(values)]
    return [harmless(line) for line in found]


def table(found: Sequence[CurveComparison]) -> list[str]:
    """Return a header and a line per metric."""
    return [harmless(line) for line in aligned([HEAD, *map(_row, found)])]


def sentence(found: list[CurveComparison], *, failure: str = "", ends: tuple[int, int] = (0, 0)) -> str:
    """Return the verdict. failure: of this run, if the original did not fail; ends: the last step of each run."""
    if failure:
        return f"NOT reproduced: {failure}"
    if is_reproduced(found):
        count = sum(each.num_common for each in found)
        compared = f"{_of(count, 'point')} of {_of(sum(each.num_common > 0 for each in found), 'metric')}"
        if ends[0] != ends[1]:
            compared += f", up to step {min(ends):,}: it ended at {ends[0]:,} then, and at {ends[1]:,} now"
        largest = max(found, key=lambda each: each.largest)
        if not largest.largest:
            return f"reproduced bitwise ({compared})"
        where = f"the largest difference is {largest.largest:.1e}, of {largest.name} at step {largest.largest_step}"
        return f"reproduced {CLOSE} ({compared}; {where})"
    first = earliest(found)
    if first is None:
        return "NOT reproduced: the two have no point in common"
    others = sum(each.verdict == DIFFERENT for each in found) - 1
    more = f"; so do {others} more" if others > 1 else "; so does one more" if others else ""
    return f"NOT reproduced: {harmless(first.name)} {_departure(first)}{more}"


def write(
    folder: Path,
    original: RecordedRun,
    found: list[CurveComparison],
    differences: Sequence[ValueDifference],
    *,
    said: str,
    same: bool,
) -> None:
    """Write reproduce.json. NaN and infinities are strings."""
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


def _departure(first: CurveComparison) -> str:
    if first.then is None or first.now is None:
        if not first.num_common:
            return "is missing"
        had = first.num_common + first.num_missing
        return f"has {_of(first.num_common + first.num_additional, 'point')}, and had {had:,}"
    return f"differs from step {first.first_step} on ({first.then:.9g} then, {first.now:.9g} now)"


def _row(each: CurveComparison) -> tuple[str, ...]:
    points = f"{each.num_common:,}"
    points += f", {each.num_missing:,} missing" if each.num_missing else ""
    points += f", {each.num_additional:,} more" if each.num_additional else ""
    largest = f"{each.largest:.1e}" if each.largest else "0" if each.num_common else ""
    first = str(each.first_step) if each.first_step is not None and each.verdict != NOT_COMPARED else ""
    return each.name, points, each.verdict, largest, first


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _side_by_side(differences: Sequence[ValueDifference]) -> list[str]:
    rows = [("", "was", "is"), *((each.what, *each.values) for each in differences)]
    return [f"        {line}" for line in aligned(rows)]


def _of_code(original: RecordedRun) -> str:
    if "git_commit" not in original.tags:
        return ", as far as is known: its folder was in no git repository"
    return ", uncommitted changes too" if original.tags.get("git_dirty") == "true" else ""


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def restoring_command(original: RecordedRun, here: provenance.Git | None) -> str:
    """Return the command that restores the run's code if it had uncommitted changes, else an empty string."""
    commit = original.tags.get("git_commit")
    if commit is None or original.tags.get("git_dirty") != "true" or is_same_code(recorded.of_run(original).git, here):
        return ""
    if original.store is None:
        is_root = Path(".git").exists()
        path = f"{original.name}/{DIFF}" if is_root else str(original.folder / DIFF)
    else:
        path = DIFF
    stash = "git stash && " if here is not None and here.dirty else ""
    return f"{stash}git checkout {commit} && git apply {path}"


def data_check(original: RecordedRun, *, anyway: bool, say: Callable[[str], None]) -> Callable[[Parts], None]:
    """Return a function of the built parts that raises a RunnerError if their data differ from the run's."""

    def check(parts: Parts) -> None:
        before, now = str(original.dataset.get("digest") or ""), data_digest(parts)
        if not before:
            say("data:   the run did not record its data: not compared")
        elif before == now:
            rows = parts.source.rows
            limits = " (only the class and length of a Dataset)" if isinstance(rows, Dataset) else ""
            say(f"data:   unchanged, by its fingerprint {now[:12]}{limits}")
        else:
            problem = f"{original.data} then; {parts.source.name}, {sum(parts.splits.sizes.values()):,} rows, fingerprint {now[:12]} now"
            if not anyway:
                asked = f"reproduce {original.name}"
                fix = "restore the data, or use `--anyway` to continue"
                raise RunnerError.of(asked, f"the data differs: {problem}", fix)
            say(f"warning: the data differs: {problem}")

    return check
