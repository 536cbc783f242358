"""summary.json after reading: typed, and complete with later values."""

import json

import pytest

from runner.experiment.summary import Summary


def test_read_leaves_out_values_of_wrong_types(tmp_path):
    values = {"status": "killed", "error": {"a": 1}, "num_steps": "x", "steps_per_second": 3, "unknown": 1}
    (tmp_path / "summary.json").write_text(json.dumps(values))
    assert Summary.read(tmp_path) == Summary("killed", steps_per_second=3)


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_unreadable_summary_is_empty(tmp_path, text):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    assert Summary.read(tmp_path) == Summary()
    Summary.note(tmp_path, run_id="abc")
    assert not Summary.read(tmp_path).run_id


def test_note_adds_to_a_summary(tmp_path):
    Summary("finished", num_steps=3).write(tmp_path)
    Summary.note(tmp_path, run_id="abc", tracker={"points_pending": 0})
    found = Summary.read(tmp_path)
    assert (found.status, found.num_steps, found.run_id) == ("finished", 3, "abc")
    assert found.tracker == {"points_pending": 0}
