"""The directory that RUN means, and the suggestion if it is not that of one run."""

import pytest
from refused import problems_of

from runner.runs import find
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal_records import FILE as JOURNAL


@pytest.mark.parametrize(
    "expected",
    [
        "my rum",
        "./my rum/",
        "elsewhere/other_rum",
        "outputs/day/frist",
        "0123456789abcdee",
        pytest.param("x" * 300, id="too long"),
        pytest.param("a\0b/c", id="with a zero"),
    ],
)
def test_find_unknown_name_suggests_nearest(own_folder, expected, messages):
    for name in ("my run", "elsewhere/other_run", "outputs/day/first"):
        (own_folder / name / "journal").mkdir(parents=True)
        (own_folder / name / "rerun.yaml").touch()
        (own_folder / name / JOURNAL).touch()
    write_ack(own_folder / "outputs/day/first", Ack(run_id="0123456789abcdef"))
    messages(problems_of(find.locate, expected, verb="diff"))


def test_find_last_without_runs_raises(own_folder, messages):
    for expected in ("last", "nothing"):
        messages(problems_of(find.locate, expected, verb="diff"))


@pytest.mark.parametrize("verb", ["resume", "evaluate"])
def test_find_sweep_is_refused(own_folder, verb, messages):
    (own_folder / "my sweep").mkdir()
    (own_folder / "my sweep/ledger.jsonl").touch()
    messages(problems_of(find.locate, "my sweep", verb=verb))
