"""A run in progress: new points are read once, its end, and curves in columns."""

import os

import numpy as np
import pytest
from written_journals import end, rows, start

from runner.sweep.report.results import Goal
from runner.tools import live
from runner.tools.live import LiveRun, thin
from runner.tracking.journal import Journal
from runner.tracking.journal_records import FILE

PARAMS = {"facts.num_steps": "40", "train.early_stopping.metric": "null"}


def test_what_is_new_is_read_once(tmp_path):
    run = LiveRun(tmp_path)
    assert not run.read() and run.step == 0 and run.last("train/loss") is None
    with Journal(tmp_path) as journal:
        start(journal, params=PARAMS)
        rows(journal, 1, 5)
        assert run.read() and not run.read()
        assert (run.step, run.num_steps, run.goal) == (5, 40, Goal("val/loss", "min"))
        rows(journal, 6, 5)
        journal.points(["val/loss"], [10], [0], [[0.5]])
        assert run.read()
        steps, values = run.points("train/loss")
        assert steps.tolist() == list(range(1, 11)) and values.tolist() == steps.tolist()
        assert run.names == ["train/loss", "train/accuracy", "val/loss"]
        assert run.status == "running"
        end(journal, "FAILED")
    assert run.read() and run.status == "failed"
    with Journal(tmp_path) as journal:
        start(journal)  # resumed
        assert run.read() and run.status == "running"


def test_replaced_journal_is_read_again(tmp_path):
    run = LiveRun(tmp_path)
    for count in (9, 3):
        (tmp_path / FILE).unlink(missing_ok=True)
        with Journal(tmp_path) as journal:
            rows(journal, 1, count)
        run.read()
        assert run.points("train/loss")[0].tolist() == list(range(1, count + 1))


def test_killed_run_has_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "SECONDS_BETWEEN_LOOKS", 0)
    run, other = LiveRun(tmp_path), LiveRun(tmp_path)
    with Journal(tmp_path) as journal:
        start(journal)
        run.read(), other.read()
        assert run.status == "running"
    assert run.status == "killed"  # its lock was seen before, and is gone
    assert other.status == "running"  # it may run on another machine, and was written recently
    os.utime(tmp_path / FILE, (0, 0))
    assert other.status == "killed"


@pytest.mark.parametrize(
    ("metric", "mode", "best"), [("val/loss", "null", 1), ("val/odd", "max", 3), ("val/accuracy", "null", 3)]
)
def test_live_best_uses_runs_metric(tmp_path, metric, mode, best):
    with Journal(tmp_path) as journal:
        start(journal, params={**PARAMS, "train.early_stopping.metric": metric, "train.early_stopping.mode": mode})
        journal.points([metric], [1, 2, 3, 4], [0] * 4, [[1.0], [2.0], [3.0], [np.nan]])
    run = LiveRun(tmp_path)
    run.read()
    assert run.best(metric) == (best, best)


def test_one_step_spike_is_visible():
    steps = np.arange(1, 1001)
    values = np.full(1000, 2.0)
    values[555], values[700:800] = 9.0, np.nan
    found = thin((steps, values), 10, first=1, last=1000)
    assert found.greatest[5] == 9.0 and found.least[5] == 2.0 and found.mean[5] == pytest.approx(2.07)
    assert np.isnan(found.mean[7]) and not np.isnan(found.mean[[0, 9]]).any()
    again = np.argsort(np.random.default_rng(0).random(1000))  # a resumed run
    assert np.array_equal(
        thin((steps[again], values[again]), 10, first=1, last=1000).greatest, found.greatest, equal_nan=True
    )
    overtaken = thin(
        (np.r_[1:101, 51:71], np.r_[np.full(60, 1.0), np.full(40, 9.0), np.zeros(20)]), 7, first=1, last=70
    )
    assert (overtaken.greatest.tolist(), overtaken.mean.tolist()) == ([1.0] * 5 + [0.0] * 2, [1.0] * 5 + [0.0] * 2)
    empty = thin((np.array([], np.int64), np.array([])), 10, first=1, last=1000)
    assert np.isnan(empty.least).all()
