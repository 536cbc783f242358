"""Journals and MLflow stores for the tests of this room."""

import gc
import os
import shutil
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest

from runner.tracking import mlflow_store
from runner.tracking.journal import Journal
from runner.tracking.pipe import Line


def pytest_collection_modifyitems(items):
    """MLflow 3.17 uses what SQLAlchemy 2.1 deprecates; every other warning is an error here, too."""
    for item in items:
        if "tests/tracking" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"))


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """MLflow with our settings; the threads of its artifact stores end with them."""
    for name, value in mlflow_store.SETTINGS.items():
        monkeypatch.setenv(name, value)
    yield
    if any(thread.name.startswith("Mlflow") for thread in threading.enumerate()):
        gc.collect()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A sqlite store, made once: its migrations take two seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    with mlflow_store.settings():
        mlflow_store.open_store(f"sqlite:///{path}")
    return path


@pytest.fixture
def uri(empty_store, tmp_path):
    """A fresh sqlite store of the test's own, in a folder whose name has a blank."""
    path = tmp_path / "my store" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(empty_store, path)
    return f"sqlite:///{path}"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def journal(folder):
    with Journal(folder) as opened:
        yield opened


@pytest.fixture
def client(uri):
    return mlflow_store.open_store(uri)


def start(journal, **fields):
    """Appends a start as app writes it; the fields given win."""
    given = {
        "uid": uuid.uuid4().hex,
        "experiment": "digits",
        "run_name": "mlp digits cpu",
        "start_ms": 1_700_000_000_000,
        "params": {"optimizer.lr": "0.1"},
        "tags": {"device": "cpu"},
        "system_metrics": False,
    }
    journal.event("start", **{**given, **fields})


def rows(journal, first, count, *, names=("train/loss", "train/accuracy")):
    """Appends `count` steps from `first` on; a value tells its step and its column."""
    steps = np.arange(first, first + count)
    values = steps[:, None] + np.arange(len(names)) / 10
    journal.points(names, steps, 1_700_000_000_000 + steps, values)


def end(journal, status="FINISHED"):
    journal.event("end", status=status, end_ms=1_700_000_100_000)


def history(client, run_id, name):
    """[(step, time_ms, value), ...] of one metric, by step."""
    return sorted((point.step, point.timestamp, point.value) for point in client.get_metric_history(run_id, name))


@pytest.fixture
def write():
    """The functions that fill a journal, and the one that reads a store."""

    class Write:
        start, rows, end, history = map(staticmethod, (start, rows, end, history))

    return Write


@pytest.fixture
def pipe():
    """The line between a training and its publishing process, both ends in this one."""
    read, write = os.pipe()
    open_ends = {read, write}

    class Pipe:
        def line(self, grace_seconds=0.0):
            return Line(read, grace_seconds=grace_seconds)

        def say(self, words):
            os.write(write, words)

        def close(self):
            open_ends.discard(write)
            os.close(write)

    yield Pipe()
    if write in open_ends:
        os.close(write)
    for thread in threading.enumerate():
        if thread.name == "runner-line":
            thread.join(5)
            assert not thread.is_alive()
    os.close(read)


@pytest.fixture
def open_fds():
    """How many files this process holds open; Linux only."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
