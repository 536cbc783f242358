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
