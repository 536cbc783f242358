"""MLflow's database is restored from a backup, or damaged, after it has acknowledged a journal."""

import sqlite3

import pytest

from runner.tracking import mlflow_store
from runner.tracking.journal import Journal
from runner.tracking.sync import sync
from runner.tracking.uploader import Uploader

UID = "0123456789abcdef"
CONTENT = {
    "metrics": "key, value, timestamp, step, is_nan",
    "latest_metrics": "key, value, timestamp, step, is_nan",
    "params": "key, value",
    "tags": "key, value",
    "runs": "run_uuid, status, end_time",
}
LOST_TAIL = "delete from metrics where step > 90; update latest_metrics set step = 90, timestamp = 1700000000090"


def content(database):
    with sqlite3.connect(database) as opened:
        return {table: sorted(opened.execute(f"select {names} from {table}")) for table, names in CONTENT.items()}


def damage(database, statements):
    with sqlite3.connect(database) as opened:
        opened.executescript(statements)
    opened.close()


@pytest.fixture
def database(any_store, tmp_path):
    return tmp_path / "mlflow.db" if any_store.startswith("http") else any_store.removeprefix("sqlite:///")


def write_and_sync(folder, uri, write, *, most=None):
    """Write a run that was killed after 150 steps, resumed, killed again and resumed to its end."""
    for first in (1, 151):
        with Journal(folder) as journal:
            write.start(journal, uid=UID, points={"most": most, "expected": 300})
            write.rows(journal, first, 75)
            write.rows(journal, first + 75, 75)
        assert sync(folder, uri).died
    with Journal(folder) as journal:
        write.start(journal, uid=UID, points={"most": most, "expected": 300})
        write.rows(journal, 300, 1, names=("val/loss",))
        journal.event("tags", tags={"late": "1"})
        write.end(journal)
    assert sync(folder, uri).is_complete


@pytest.mark.parametrize(
    ("any_store", "most", "lost"),
    [
        ("sqlite", None, "delete from metrics where step > 90"),
        ("sqlite", 40, LOST_TAIL),
        ("sqlite", 40, "delete from metrics"),
        ("server", None, LOST_TAIL),
    ],
    indirect=["any_store"],
)
def test_sync_after_lost_points_restores_each_once(folder, any_store, database, write, most, lost):
    write_and_sync(folder, any_store, write, most=most)
    before = content(database)
    damage(database, lost)
    num_lost = len(before["metrics"]) - len(content(database)["metrics"])
    ack = sync(folder, any_store)
    assert content(database) == before
    assert ack.is_complete and ack.points_restored == num_lost and ack.points_written == len(before["metrics"])
    assert sync(folder, any_store) == ack


@pytest.mark.parametrize(
    ("any_store", "lost"),
    [
        ("sqlite", "delete from tags where key not like 'mlflow.%'"),
        ("sqlite", "delete from params"),
        ("server", "update runs set status = 'RUNNING', end_time = null"),
        ("sqlite", "delete from metrics where step = 120"),
        ("sqlite", "delete from metrics where key = 'val/loss'; delete from latest_metrics where key = 'val/loss'"),
    ],
    indirect=["any_store"],
)
def test_sync_after_other_losses_restores_the_run(folder, any_store, database, write, lost):
    write_and_sync(folder, any_store, write)
    before = content(database)
    damage(database, lost)
    assert content(database) != before
    assert sync(folder, any_store).is_complete and content(database) == before


def test_sync_after_a_lost_parent_restores_it(folder, tmp_path, uri, client, write):
    for path in (sweep := tmp_path / "sweep", folder):
        with Journal(path) as journal:
            write.start(journal, uid=path.name)
            if path == folder:
                journal.event("parent", uid="sweep", experiment="digits")
            write.end(journal)
    parent_id, run_id = sync(sweep, uri).run_id, sync(folder, uri).run_id
    client.delete_tag(run_id, mlflow_store.PARENT_TAG)
    assert sync(folder, uri).is_complete
    assert client.get_run(run_id).data.tags[mlflow_store.PARENT_TAG] == parent_id


def test_resume_after_lost_points_restores_each_once(folder, uri, client, write):
    with Journal(folder) as journal:
        write.start(journal, uid=UID)
        write.rows(journal, 1, 150)
    run_id = sync(folder, uri).run_id
    damage(uri.removeprefix("sqlite:///"), LOST_TAIL)
    with Journal(folder) as journal:
        write.start(journal, uid=UID)
        write.rows(journal, 151, 50)
        assert Uploader(folder, uri).attempt()
    assert [step for step, *_ in write.history(client, run_id, "train/loss")] == list(range(1, 201))
    assert client.get_run(run_id).data.metrics["train/loss"] == 200


def test_deleted_experiment_is_reported_with_its_command(folder, uri, client, write):
    with Journal(folder) as journal:
        write.start(journal)
        write.end(journal)
    number = sync(folder, uri).experiment_id
    client.delete_experiment(number)
    ack = sync(folder, uri, grace_seconds=0)
    assert f"mlflow experiments restore --experiment-id {number}" in ack.error
