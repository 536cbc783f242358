import json

import pytest

from runner.tracking.ack import FILE, Ack, read_ack, write_ack


def test_ack_is_read_as_written(folder):
    ack = Ack(offset=0, points_written=7, run_id="r", postponed=({"kind": "artifact", "path": "p"},), warnings=("w",))
    write_ack(folder, ack)
    assert read_ack(folder) == ack
    assert json.loads((folder / FILE).read_text())["state"] == "publishing"
    assert [path.name for path in (folder / "journal").iterdir()] == ["ack.json"]


def test_ack_read_counts_pending_points(folder, journal, write):
    write.rows(journal, 1, 10)
    middle = journal.path.stat().st_size
    write.rows(journal, 11, 5)
    assert read_ack(folder).points_pending == 30
    write_ack(folder, Ack(offset=middle))
    assert read_ack(folder).points_pending == 10
    write_ack(folder, Ack(offset=journal.path.stat().st_size))
    assert read_ack(folder).points_pending == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"offset": 1, "unknown": 2, "postponed": [], "warnings": []}'])
def test_unreadable_ack_counts_as_empty(folder, text):
    (folder / "journal").mkdir()
    (folder / FILE).write_text(text)
    assert read_ack(folder) == Ack()


@pytest.mark.parametrize(
    ("ack", "state", "is_complete"),
    [
        (Ack(), "waiting", False),
        (Ack(run_id="r"), "publishing", False),
        (Ack(run_id="r", error="away"), "failing", False),
        (Ack(run_id="r", died=True), "died", True),
        (Ack(run_id="r", ended=True), "ended", True),
        (Ack(run_id="r", ended=True, points_pending=1), "ended", False),
        (Ack(run_id="r", ended=True, postponed=({},)), "ended", False),
    ],
)
def test_ack_state_is_one_name(ack, state, is_complete):
    assert (ack.state, ack.is_complete) == (state, is_complete)
