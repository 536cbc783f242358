"""Journals written by hand, an empty store, and MLflow with our timeouts."""

import gc
import threading
import uuid
from types import SimpleNamespace

import numpy as np
import pytest
from fault_proxy import Server

from runner.tracking import mlflow_store


@pytest.fixture
def patience(monkeypatch):
    """Use our settings of MLflow; the threads of its artifact stores end with them."""
    for name, value in mlflow_store.SETTINGS.items():
        monkeypatch.setenv(name, value)
    yield
    if any(thread.name.startswith("Mlflow") for thread in threading.enumerate()):
        gc.collect()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A sqlite store, created once: its migrations take two seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    with mlflow_store.settings():
        mlflow_store.open_store(f"sqlite:///{path}")
    gc.collect()
    gc.freeze()  # MLflow's modules: `patience` collects after each test
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory, empty_store, warm):
    """A real `mlflow server` over a sqlite store, on a free local port, for all tests of a module."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    server = Server(folder, warm.program)
    server.start()
    yield server
    server.kill()


def start(journal, **fields):
    """Append a start event like the runner's; the given fields replace its defaults."""
    given = {"uid": uuid.uuid4().hex, "experiment": "digits", "run_name": "mlp digits cpu", "system_metrics": False}
    given |= {"start_ms": 1_700_000_000_000, "params": {"optimizer.lr": "0.1"}, "tags": {"device": "cpu"}}
    journal.event("start", **{**given, **fields})


def rows(journal, first, count, *, names=("train/loss", "train/accuracy")):
    """Append `count` steps from `first` on; a value contains its step and its column."""
    steps = np.arange(first, first + count)
    values = steps[:, None] + np.arange(len(names)) / 10
    journal.points(names, steps, 1_700_000_000_000 + steps, values)


def end(journal, status="FINISHED"):
    journal.event("end", status=status, end_ms=1_700_000_100_000)


def history(client, run_id, name):
    """Return [(step, time_ms, value), ...] of one metric, by step."""
    return sorted((point.step, point.timestamp, point.value) for point in client.get_metric_history(run_id, name))


@pytest.fixture
def write():
    """The functions that fill a journal, and the one that reads a store."""
    return SimpleNamespace(start=start, rows=rows, end=end, history=history)
