import numpy as np

from runner.sweep.progress_table import Watch
from runner.tracking.journal import Journal


def test_a_watch_follows_a_journal_as_it_grows(tmp_path):
    watch = Watch(tmp_path)
    watch.look()
    assert (watch.step, watch.num_steps, watch.values) == (0, 0, {})
    with Journal(tmp_path) as journal:
        journal.event("start", uid="u", params={"facts.num_steps": "40"})
        journal.points(("train/loss", "train/accuracy"), [1, 2], [5, 6], np.array([[2.0, 0.1], [1.5, 0.2]]))
        watch.look()
        assert (watch.step, watch.num_steps, watch.values) == (2, 40, {"train/loss": 1.5, "train/accuracy": 0.2})
        journal.points(("val/loss",), [2], [7], np.array([[1.0]]))
        watch.look()
        assert watch.values["val/loss"] == 1.0 and watch.step == 2
        read = watch._offset
        watch.look()
        assert watch._offset == read == journal.path.stat().st_size
