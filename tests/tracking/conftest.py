"""Journals and MLflow stores for the tests of tracking."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from fault_proxy import Server

from runner.tracking import mlflow_store
from runner.tracking.journal import Journal
from runner.tracking.pipe import Line, line_of
from runner.tracking.uploader import Uploader


def pytest_collection_modifyitems(items):
    """MLflow 3.17 uses features that SQLAlchemy 2.1 deprecates; every other warning is an error here, too."""
    for item in items:
        if "tests/tracking" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"))


@pytest.fixture(autouse=True)
def with_our_patience(patience):
    return patience


@pytest.fixture
def uri(empty_store, tmp_path):
    """A new sqlite store for the test, in a directory whose name has a space."""
    path = tmp_path / "my store" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(empty_store, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "server"])
def any_store(request, uri, tmp_path, empty_store, warm):
    """A store of either kind."""
    if request.param == "sqlite":
        yield uri
        return
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    server = Server(tmp_path, warm.program)
    server.start()
    yield server.uri
    server.kill()


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


@pytest.fixture
def upload(folder, uri):
    """Return a function that sends the pending records with a new uploader, as after a restart."""

    def send(**how):
        uploader = Uploader(folder, uri, **how)
        assert uploader.attempt(postponed=True), uploader.ack
        return uploader.ack

    return send


@pytest.fixture
def pipe():
    """The pipe between a training and its publishing process, with both ends in this process."""
    read, write = os.pipe()
    reader = os.fdopen(read, "rb")
    open_ends = {write}

    class Pipe:
        def line(self, grace_seconds=0.0):
            return Line(reader, grace_seconds=grace_seconds)

        def say(self, *words):
            os.write(write, line_of(*words))

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
    reader.close()


@pytest.fixture
def open_fds():
    """Return a function that counts the open files of this process; Linux only."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    return lambda: len(list(Path("/proc/self/fd").iterdir()))
