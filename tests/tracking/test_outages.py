"""A real `mlflow server` that is killed: every point arrives exactly once. test_faults.py: other faults."""

import contextlib

import pytest
from fault_proxy import Server
from waiting import wait_for

from runner.tracking.ack import read_ack
from runner.tracking.journal import Journal
from runner.tracking.publisher import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]


@pytest.fixture
def server(tmp_path, empty_store, warm):
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    server = Server(folder, warm.program)
    yield server
    server.kill()


@pytest.fixture
def stored(server, write):
    """Check the server's database, which must have one run with correct values. Returns {name: steps}."""

    def look(run_id):
        from runner.tracking.mlflow_store import open_store

        client = open_store(f"sqlite:///{server.folder}/mlflow.db")
        (run,) = client.search_runs([found.experiment_id for found in client.search_experiments()])
        assert run.info.run_id == run_id
        points = {name: write.history(client, run_id, name) for name in run.data.metrics if name.startswith("train/")}
        for column, name in enumerate(("train/loss", "train/accuracy")):
            assert all(
                point == (point[0], 1_700_000_000_000 + point[0], point[0] + column / 10) for point in points[name]
            )
        return run, {name: [step for step, *_ in points[name]] for name in points}

    return look


def test_killed_server_has_each_point_once(folder, write, server, stored):
    server.start()
    first = 1
    with Publisher.start(folder, server.uri) as publisher, Journal(folder) as journal:

        def go_on(windows):
            nonlocal first
            for _ in range(windows):
                write.rows(journal, first, 100)
                first += 100

        write.start(journal)
        for _ in range(2):
            before = read_ack(folder).points_written
            go_on(10)
            wait_for(lambda before=before: read_ack(folder).points_written > before)
            server.kill()  # while thousands of points are pending
            go_on(2)
            wait_for(lambda: read_ack(folder).error)
            server.start()
        write.end(journal)
        ack = publisher.finish(grace_seconds=30)
    assert ack.is_complete and ack.error is None and ack.points_written == 2 * (first - 1)
    run, steps = stored(ack.run_id)
    assert run.info.status == "FINISHED"
    assert steps == {"train/loss": list(range(1, first)), "train/accuracy": list(range(1, first))}


def test_sweep_survives_a_killed_server(folder, write, server):
    from runner.tracking.mlflow_store import open_store

    server.start()
    jobs = [folder / str(number) for number in range(4)]
    with Publisher.start(folder, server.uri) as publisher, contextlib.ExitStack() as stack:
        sweep, *journals = [stack.enter_context(Journal(path)) for path in (folder, *jobs)]
        write.start(sweep, uid="sweep")
        for path, journal in zip(jobs, journals, strict=True):
            write.start(journal, uid=path.name)
            journal.event("parent", uid="sweep", experiment="digits")
            write.rows(journal, 1, 200)
            publisher.follow(path)
        wait_for(lambda: any(read_ack(path).points_written for path in jobs))
        server.kill()
        for journal in journals:
            write.rows(journal, 201, 200)
        wait_for(lambda: all(read_ack(path).error for path in (folder, *jobs)))  # each run's page can show it
        for path, journal in zip(jobs[:2], journals[:2], strict=True):
            write.end(journal)
            publisher.gone(path)
        journals[2].close()  # like a killed process
        publisher.gone(jobs[2])
        server.start()
        wait_for(lambda: all(publisher.ack_of(path).is_complete for path in jobs[:3]))
        for journal in (*journals[3:], sweep):
            write.end(journal)
        ack = publisher.finish(grace_seconds=30)
        assert publisher._process.returncode == 0
    assert ack.is_complete and ack.error is None
    client = open_store(f"sqlite:///{server.folder}/mlflow.db")
    assert len(client.search_runs([ack.experiment_id])) == 5
    for path in jobs:
        found = read_ack(path)
        assert found.points_written == 800 and found.error is None
        run = client.get_run(found.run_id)
        assert run.info.status == ("KILLED" if path == jobs[2] else "FINISHED")
        assert run.data.tags["mlflow.parentRunId"] == ack.run_id
        for column, name in enumerate(("train/loss", "train/accuracy")):
            expected = [(step, 1_700_000_000_000 + step, step + column / 10) for step in range(1, 401)]
            assert write.history(client, found.run_id, name) == expected
