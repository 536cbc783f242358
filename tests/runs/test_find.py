"""Which folder a person means by RUN, and what is to be typed where it is none of one run."""

import pytest

from runner.errors import RunnerError
from runner.runs import find
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal_records import FILE as JOURNAL


@pytest.mark.parametrize(
    ("wanted", "write"),
    [
        ("my rum", "diff 'my run'"),
        ("./my rum/", "diff 'my run'"),
        ("elsewhere/other_rum", "diff elsewhere/other_run"),
        ("outputs/day/frist", "diff outputs/day/first"),
        ("0123456789abcdee", "diff 0123456789abcdef"),
        ("x" * 300, "diff last, or the folder that the run's last lines name"),
    ],
)
def test_a_name_that_is_no_run_s_says_the_nearest_that_is(own_folder, wanted, write):
    for name in ("my run", "elsewhere/other_run", "outputs/day/first"):
        (own_folder / name / "journal").mkdir(parents=True)
        (own_folder / name / "rerun.yaml").touch()
        (own_folder / name / JOURNAL).touch()
    write_ack(own_folder / "outputs/day/first", Ack(run_id="0123456789abcdef"))
    with pytest.raises(RunnerError) as refused:
        find.locate(wanted, verb="diff")
    assert [fault.fix for fault in refused.value.faults] == [write]


def test_where_no_run_is_none_is_said_to_be_the_last(own_folder):
    for wanted in ("last", "nothing"):
        with pytest.raises(RunnerError) as refused:
            find.locate(wanted, verb="diff")
        assert refused.value.faults[0].fix.startswith("diff FOLDER")


@pytest.mark.parametrize(
    ("verb", "write"),
    [("resume", "the words of the sweep with 'sweep.resume=my sweep'"), ("evaluate", "evaluate 'my sweep/0', say")],
)
def test_a_sweep_is_many_runs(own_folder, verb, write):
    (own_folder / "my sweep").mkdir()
    (own_folder / "my sweep/ledger.jsonl").touch()
    with pytest.raises(RunnerError) as refused:
        find.locate("my sweep", verb=verb)
    assert [fault.fix for fault in refused.value.faults] == [write]
