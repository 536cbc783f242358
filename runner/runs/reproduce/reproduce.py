"""`reproduce`: runs a run again as a new one, compares the two, says what is the same and what is not.

Called by cli/commands.py. Its steps: original.py, differences.py, experiment/run.py, compare.py, text.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from runner.config.identity import chosen
from runner.runs.reproduce import original as originals
from runner.runs.reproduce.compare import Points, compare_all, is_reproduced, last_step
from runner.runs.reproduce.recorded import Original

if TYPE_CHECKING:
    from runner.experiment.given import Checked

FLAGS = ("--anyway", "--trust")
#: keys that make a run end elsewhere and leave what it measures until then as it is
OF_LENGTH = ("train.num_epochs", "train.num_steps", "train.max_seconds", "train.early_stopping.")


def original(wanted: str, overrides: list[str], *, trusted: bool) -> AbstractContextManager[Original]:
    """The run that is meant; see runner.runs.reproduce.original."""
    return originals.original(wanted, uri=originals.default_uri(overrides), trusted=trusted)


def repeat(
    original: Original, cfg: DictConfig, folder: Path, *, checked: Checked | None, anyway: bool
) -> tuple[dict[str, Any], bool]:
    """Runs the configuration as a new run in `folder`, and compares. Returns its summary, and whether it is the same.

    Raises: RunnerError for data that is not the same, unless `anyway`, and for whatever keeps a run from starting.
    """
    from runner.experiment import provenance, run  # torch
    from runner.experiment.check import check_here
    from runner.experiment.console import Screen
    from runner.experiment.given import Checked, Given, Repetition
    from runner.runs.reproduce import differences, making, text

    if original.store is not None:
        cfg.tracking.uri = original.store  # not where a stranger's file says
    screen = Screen()
    hardware, choice = checked or check_here(cfg)
    before = making.of_run(original)
    made = making.differing([before, making.of_now(choice, hardware, files=before.notes)])
    values = making.of_values([original.chosen(), chosen(cfg)])
    code_lines = differences.how_to_get_the_code(original, provenance.git_state())
    for line in text.said_first(original, made, values, code_lines=code_lines):
        screen.say(line)
    check_data = differences.data_check(original, anyway=anyway, say=screen.say)
    repetition = Repetition(original.run_id or original.name, check_data)
    given = Given(checked=Checked(hardware, choice), repetition=repetition, owns_process=True)
    summary = run.run(cfg, folder, given=given)

    now = _series(folder, spelled=original.store is not None)
    is_other_end = _ends_elsewhere(original, cfg, summary, [each.what for each in values])
    found = compare_all(original.series, now, may_end_elsewhere=is_other_end)
    failure = f"this run failed: {summary['error']}" if summary["status"] == "failed" != original.status else ""
    same = is_reproduced(found) and not failure
    said = text.sentence(found, failure=failure, ends=(original.last_step, last_step(now)))
    text.write(folder, original, found, [*made, *values], said=said, same=same)
    for line in ("", *text.table(found), "", said):
        screen.say(line)
    return summary, same


def _series(folder: Path, *, spelled: bool) -> dict[str, Points]:
    from runner.tracking.journal_reader import read_series
    from runner.tracking.mlflow_names import Names

    found = {name: (steps, values) for name, (steps, _, values) in read_series(folder).items()}
    names = Names()  # in the order of the journal
    return {names.key(name): points for name, points in found.items()} if spelled else found


def _ends_elsewhere(original: Original, cfg: DictConfig, summary: dict[str, Any], changed: list[str]) -> bool:
    is_short = not original.is_whole or summary["status"] != "finished" or cfg.train.max_seconds is not None
    return is_short or any(key.startswith(OF_LENGTH) for key in changed)
