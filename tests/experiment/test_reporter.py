"""Measured values reach the journal, in one write if the disk was busy, and also after it was full for a while."""

import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runner import cli
from runner.experiment.reporter import Reporter
from runner.tracking import journal as journal_module
from runner.tracking.journal import Journal, read_points
from runner.training.metric_buffer import Window


def screen(say=None):
    return SimpleNamespace(say=say, window=lambda window: None)


def window(step):
    return Window(
        ("train/loss",), np.array([step]), np.full((1, 1), float(step), np.float32), np.array([step]), 1.0, 1, {}
    )


def test_temporarily_full_disk_loses_nothing(tmp_path, monkeypatch):
    with Journal(tmp_path) as journal:
        reporter = Reporter(tmp_path, journal, screen())
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
        assert reporter.points == 0
        reporter.window(window(2))
        reporter.values({"val/loss": 0.5}, step=2, time_ms=7)
        reporter.settle()
        reporter.settle()
        assert len(calls) == 2
        assert reporter.points == 3
        assert reporter.metrics["val/loss"] == 0.5
    points = read_points(tmp_path)
    assert [row[0] for row in points["train/loss"]] == [1, 2]
    assert [tuple(row) for row in points["val/loss"]] == [(2, 0.5)]


def test_mlflow_failure_is_printed_at_once(tmp_path):
    found, said = [None, "no room", None], []
    publisher = SimpleNamespace(first_failure=lambda: found.pop(0))
    with Journal(tmp_path) as journal:
        reporter = Reporter(tmp_path, journal, screen(said.append), publisher=publisher)
        for step in (1, 2, 3):
            reporter.window(window(step))
            reporter.settle()
    assert said == ["tracking: no room; the run continues, and its journal keeps everything"] and found == []


def test_journal_rows_are_not_repeated_without_sync(tmp_path, monkeypatch):
    with Journal(tmp_path) as journal:
        reporter = Reporter(tmp_path, journal, screen())

        def refuse(fd):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(journal_module, "_sync", refuse)
            reporter.window(window(1))
            with pytest.raises(OSError, match="Input/output error"):
                reporter.settle()
        reporter.window(window(2))
        reporter.settle()
    assert [row[0] for row in read_points(tmp_path)["train/loss"]] == [1, 2]
    assert reporter.points == 2


LATE = """
import threading
from torch.nn import functional as F

late, calls = threading.Event(), 0

def task(model, batch):
    global calls
    calls += model.training
    if calls == 100:
        late.set()
    return {"loss": F.cross_entropy(model(batch[0]), batch[1])}
"""


def test_slow_disk_delays_no_step(own_folder, monkeypatch):
    """The first window's write ends after 20 more windows and three epochs."""
    Path("late_tasks.py").write_text(LATE)
    is_late, sync = [], journal_module._sync

    def slow(fd):
        if threading.current_thread().name == "runner-background":
            is_late.append(importlib.import_module("late_tasks").late.wait(30))
        sync(fd)

    monkeypatch.setattr(journal_module, "_sync", slow)
    words = ("device=cpu", "model=mlp", "tracking.enabled=false", "task=own", "task.function._target_=late_tasks.task")
    sizes = ["data.limit=340", "train.batch_size=8", "train.num_epochs=5", "metrics.pull_every=5"]
    sizes += ["placement.guard=off"]
    assert cli.main([*words, *sizes, "hydra.run.dir=run"]) == 0
    assert is_late and all(is_late)
    num_steps = json.loads(Path("run/summary.json").read_text())["num_steps"]
    assert num_steps > 100
    points = read_points(Path("run"))
    assert [row[0] for row in points["train/loss"]] == list(range(1, num_steps + 1))
    assert len(points["val/loss"]) == 5
