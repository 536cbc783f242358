import contextlib
import sqlite3

import numpy as np
import pytest

from runner.tracking import bulk, place, store
from runner.tracking.records import scan
from runner.tracking.sending import to_metrics


@pytest.fixture
def path(uri):
    return place.sqlite_path(uri)


@pytest.fixture
def runs(client, uri):
    experiment_id, _ = store.experiment_of(client, "digits", uri=uri)
    return [store.find_or_create_run(client, experiment_id, {}, uid=uid) for uid in ("one", "two")]


def stored(path, table, run_id):
    with contextlib.closing(sqlite3.connect(path)) as database:
        columns = "key, value, timestamp, step, is_nan, typeof(value), typeof(step), typeof(timestamp), typeof(is_nan)"
        query = f"SELECT {columns} FROM {table} WHERE run_uuid = ? ORDER BY key, step, timestamp, value"
        return database.execute(query, [run_id]).fetchall()


def test_rows_are_what_log_batch_would_have_written(client, path, runs, journal):
    values = np.random.default_rng(0).random((200, 3))
    values[5, 0], values[6, 1], values[7, 2] = np.nan, np.inf, -np.inf
    values[-1, 2] = np.nan
    for window in range(2):
        steps = np.arange(200) + window * 150  # half of them a second time, at another time
        journal.points(("train/loss", "acc[0]", "lr"), steps, 1_700_000_000_000 + steps + window, values)
    records = list(scan(journal.path))
    metrics = to_metrics(records)
    for begin in range(0, len(metrics), 1000):
        client.log_batch(runs[0], metrics=metrics[begin : begin + 1000])
    series = bulk.by_key(records)
    client.log_batch(runs[1], metrics=bulk.newest(series))
    bulk.insert(path, runs[1], series)
    assert stored(path, "metrics", runs[0]) == stored(path, "metrics", runs[1])
    assert stored(path, "latest_metrics", runs[0]) == stored(path, "latest_metrics", runs[1])


def test_rows_that_are_there_stay_as_they_are(client, path, runs, journal, write):
    write.rows(journal, 1, 100)
    series = bulk.by_key(scan(journal.path))
    for _ in range(2):
        bulk.insert(path, runs[0], series)
    assert len(stored(path, "metrics", runs[0])) == 200


def test_a_run_that_is_not_there_gets_no_rows(path, runs, journal, write):
    write.rows(journal, 1, 1)
    with pytest.raises(sqlite3.IntegrityError):
        bulk.insert(path, "0" * 32, bulk.by_key(scan(journal.path)))
    assert stored(path, "metrics", "0" * 32) == []


def test_only_a_table_that_it_knows_is_written_to(path, tmp_path):
    assert bulk.can_insert(path)
    assert not bulk.can_insert(None) and not bulk.can_insert(tmp_path / "none.db")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE metrics ADD COLUMN unit TEXT")
    assert not bulk.can_insert(path)
