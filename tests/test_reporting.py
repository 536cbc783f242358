"""What was measured reaches the journal, in one write where the disk was busy, and also when it was full for a while."""

import numpy as np
import pytest

from runner.metrics import Window
from runner.record import Record
from runner.reporting import Reporter
from runner.tracking.journal import Journal, read_points


class Screen:
    def window(self, window):
        pass


def window(step):
    return Window(
        ("train/loss",), np.array([step]), np.full((1, 1), float(step), np.float32), np.array([step]), 1.0, 1, {}
    )


@pytest.fixture
def record():
    return Record()


def test_a_disk_that_was_full_for_a_while_loses_nothing(tmp_path, record, monkeypatch):
    with Journal(tmp_path) as journal:
        reporter = Reporter(record, journal=journal, publisher=None, screen=Screen(), batch_rows=1)
        append, calls = journal._append, []

        def full_at_first(data):
            calls.append(len(data))
            if len(calls) == 1:
                raise OSError(28, "No space left on device")
            append(data)

        monkeypatch.setattr(journal, "_append", full_at_first)
        reporter.window(window(1))
        with pytest.raises(OSError, match="No space left"):
            reporter.settle()
        assert record.points == 0
        reporter.window(window(2))
        reporter.values({"val/loss": 0.5}, step=2, time_ms=7)
        reporter.settle()
        reporter.settle()
        assert len(calls) == 2
        assert record.points == 3
        assert record.metrics["val/loss"] == 0.5
    points = read_points(tmp_path)
    assert [row[0] for row in points["train/loss"]] == [1, 2]
    assert [tuple(row) for row in points["val/loss"]] == [(2, 0.5)]
