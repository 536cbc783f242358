"""Which folder a person means by RUN, and what is to be typed where it is none of one run."""

import pytest

from runner.errors import RunnerError
from runner.runs import find


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
