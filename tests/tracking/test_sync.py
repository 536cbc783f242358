import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from runner.errors import DeletedError
from runner.tracking import mlflow_events, mlflow_store
from runner.tracking.journal import Journal
from runner.tracking.sync import LOCK, find_journals, sync
from runner.tracking.uploader import Uploader


def test_running_run_is_not_marked_killed(folder, write, uri, client):
    with Journal(folder) as journal:
        write.start(journal)
        ack = sync(folder, uri)
        assert client.get_run(ack.run_id).info.status == "RUNNING" and ack.state == "publishing"
    ack = sync(folder, uri)
    assert client.get_run(ack.run_id).info.status == "KILLED" and ack.state == "died"
    with Journal(folder) as journal:  # its end was late
        write.end(journal)
    assert sync(folder, uri).is_complete and client.get_run(ack.run_id).info.status == "FINISHED"


def test_files_after_a_slow_failure_are_sent(folder, write, uri, monkeypatch):
    with Journal(folder) as journal:
        write.start(journal)
        for name in ("a.txt", "b.txt"):
            (folder / name).write_text(name)
            journal.event("artifact", path=name, to="")
        write.end(journal)
    tried = []

    def fail_first(client, run_id, folder, event):
        tried.append(event["path"])
        if event["path"] == "a.txt":
            time.sleep(0.2)
            raise OSError("upload timed out")

    monkeypatch.setattr(mlflow_events, "log_artifact", fail_first)
    (left,) = sync(folder, uri, grace_seconds=0.1).postponed
    assert left["path"] == "a.txt" and "b.txt" in tried


def test_second_process_does_not_send(folder, journal, write, uri):
    write.start(journal)
    with FileLock(folder / LOCK):
        ack = sync(folder, uri)
    assert ack.error == "another process is sending this run at this moment" and ack.run_id is None


def test_store_without_run_gets_it_again(folder, write, uri, client):
    with Journal(folder) as journal:
        write.start(journal)
        write.rows(journal, 1, 10)
        write.end(journal)
    first = sync(folder, uri)
    client.delete_run(first.run_id)
    deleted = sync(folder, uri, grace_seconds=0)
    assert "was deleted in MLflow; to continue: mlflow runs restore" in deleted.error
    client._tracking_client.store._hard_delete_run(first.run_id)  # like `mlflow gc`
    second = sync(folder, uri)
    assert second.is_complete and second.run_id != first.run_id
    assert len(write.history(client, second.run_id, "train/loss")) == 10


def test_settings_without_home_set_one(monkeypatch):
    def refuse(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", refuse)
    with mlflow_store.settings():
        assert Path.home().is_dir()
    assert "HOME" not in os.environ


def test_journal_cut_during_sync_is_sent(folder, write, uri, client):
    uploader = Uploader(folder, uri)
    with Journal(folder) as journal:
        write.start(journal)
        end = journal.path.stat().st_size
        write.rows(journal, 1, 100)
        assert uploader.attempt()
        os.truncate(journal.path, end)
        with pytest.raises(DeletedError):
            write.rows(journal, 101, 1)
        write.end(journal, "FAILED")
    assert uploader.attempt() and uploader.ack.is_complete
    assert client.get_run(uploader.ack.run_id).info.status == "FAILED"
    assert len(write.history(client, uploader.ack.run_id, "train/loss")) == 100


@pytest.mark.parametrize("has_end", [True, False])
def test_run_never_ends_before_its_last_point(folder, write, uri, client, has_end):
    future = 4_000_000_000_000
    with Journal(folder) as journal:
        write.start(journal, start_ms=future)
        journal.points(("a",), [1], [future + 5], [[1.0]])
        if has_end:
            write.end(journal)
    info = client.get_run(sync(folder, uri).run_id).info
    assert (info.start_time, info.end_time) == (future, future + 5)


def test_journals_are_found_at_and_below_a_folder(tmp_path):
    folders = [tmp_path / name for name in ("2026-01-02/10-00-00", "2026-01-01/09-00-00", "sweep/0")]
    for folder in folders:
        with Journal(folder):
            pass
    assert find_journals(tmp_path) == sorted(folders)
    assert find_journals(folders[0]) == [folders[0]]
    assert find_journals(tmp_path / "none") == []


@pytest.mark.parametrize("grace_seconds", [0.0])
def test_directory_without_run_sends_nothing(folder, uri, grace_seconds):
    with Journal(folder):
        pass
    ack = sync(folder, uri, grace_seconds=grace_seconds)
    assert ack.run_id is None and ack.error is None
