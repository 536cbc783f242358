"""One publishing process for many runs of real processes: everything arrives exactly once, whichever process dies."""

import signal
import subprocess
import sys

import psutil
import pytest
from fault_proxy import Proxy, always
from waiting import wait_for

from runner.tracking.ack import read_ack
from runner.tracking.journal import Journal
from runner.tracking.publisher import LOG, Publisher
from runner.tracking.sync import find_journals, sync

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]

#: writes a run of `steps` steps like the runner; prints a line after half of them, and waits for an answer
JOB = """
import sys
from pathlib import Path
from runner.tracking.journal import Journal
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
with Journal(folder) as journal:
    about = dict(experiment="digits", run_name=folder.name, start_ms=1_700_000_000_000, params={"name": folder.name})
    journal.event("start", uid="of " + folder.name, tags={}, system_metrics=True, **about)
    journal.event("parent", uid="sweep", experiment="digits")
    (folder / "notes.txt").write_text(folder.name)
    journal.event("artifact", path="notes.txt", to="")
    for step in range(1, steps + 1):
        journal.points(("train/loss",), [step], [1_700_000_000_000 + step], [[step / 4]])
        if step == steps // 2:
            print("half", flush=True)
            sys.stdin.readline()
    journal.event("end", status="FINISHED", end_ms=1_700_000_100_000)
"""


@pytest.fixture
def jobs(warm_programs):
    """Start jobs; none remains after a failing test."""
    started = []

    def start(folder, steps):
        folder.mkdir(parents=True)
        run = [sys.executable, "-c", JOB, str(folder), str(steps)]
        started.append(warm_programs(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for job in started:
        job.kill()
        job.communicate()


def go_on(job):
    job.stdin.write("\n")
    job.stdin.flush()


def begin(folder, write):
    """Start the sweep's journal, as it is before its jobs."""
    journal = Journal(folder)
    write.start(journal, uid="sweep", system_metrics=False)
    return journal


def check(client, write, run_id, steps, parent_id, *, status="FINISHED", name="train/loss"):
    run = client.get_run(run_id)
    assert run.info.status == status and run.data.tags["mlflow.parentRunId"] == parent_id
    expected = [(step, 1_700_000_000_000 + step, step / 4) for step in range(1, steps + 1)]
    assert write.history(client, run_id, name) == expected
    assert [found.path for found in client.list_artifacts(run_id)] == ["notes.txt"]
    return run


def test_eight_jobs_are_sent_by_one_process(folder, uri, client, write, jobs, open_fds):
    before, steps = open_fds(), 200
    folders = [folder / name for name in ("0", "1", "a b", "größe", 'qu"ote', "two\nlines", "6", "7")]
    with Publisher.start(folder, uri) as publisher, begin(folder, write) as journal:
        for job in folders:
            publisher.follow(job)
        running = [jobs(job, steps) for job in folders]
        for job in running:
            assert job.stdout.readline() == "half\n"
        wait_for(lambda: all(publisher.ack_of(job).points_written == steps // 2 for job in folders))
        assert all(client.get_run(read_ack(job).run_id).info.status == "RUNNING" for job in folders)
        for job, path in zip(running, folders, strict=True):
            go_on(job)
            assert job.wait(60) == 0
            publisher.gone(path)
        write.end(journal)
        ack = publisher.finish()
        assert publisher._process.returncode == 0
    assert ack.is_complete and (folder / LOG).read_text() == ""
    acks = [read_ack(job) for job in folders]
    assert all(found.is_complete and found.points_written == steps and found.error is None for found in acks)
    for found in acks:
        run = check(client, write, found.run_id, steps, ack.run_id)
        assert run.info.run_name == run.data.params["name"] and "system/cpu_utilization_percentage" in run.data.metrics
    assert len(client.search_runs([ack.experiment_id])) == 9
    for job in running:
        job.communicate()
    assert open_fds() == before


def test_killed_job_is_marked_during_sweep(folder, uri, client, write, jobs):
    with Publisher.start(folder, uri) as publisher, begin(folder, write) as journal:
        wait_for(lambda: publisher.ack().run_id)  # else the link to the parent is sent later
        paths = {name: folder / name for name in ("dies", "lives", "never")}
        for path in paths.values():
            publisher.follow(path)
        dies, lives = jobs(paths["dies"], 400), jobs(paths["lives"], 400)
        assert dies.stdout.readline() == lives.stdout.readline() == "half\n"
        dies.send_signal(signal.SIGKILL)
        dies.wait()
        publisher.gone(paths["dies"])
        publisher.gone(paths["never"])  # a job that died before its first record
        wait_for(lambda: publisher.ack_of(paths["dies"]).died)
        run_id = read_ack(paths["dies"]).run_id
        run = check(client, write, run_id, 200, publisher.ack().run_id, status="KILLED")
        assert run.data.tags["runner.end"] == "the process was killed"
        wait_for(lambda: read_ack(paths["lives"]).run_id)  # its run is made by another call, maybe later
        lives_id = read_ack(paths["lives"]).run_id
        assert client.get_run(lives_id).info.status == "RUNNING"
        go_on(lives)
        assert lives.wait(60) == 0
        with Journal(paths["dies"]) as again:  # a retry in the same directory and by the same process
            publisher.follow(paths["dies"])
            write.start(again, uid="of dies", params={})
            wait_for(lambda: client.get_run(run_id).info.status == "RUNNING")
            again.points(("train/loss",), [201], [1_700_000_000_201], [[201 / 4]])
            write.end(again)
        publisher.gone(paths["dies"])
        write.end(journal)
        assert publisher.finish().is_complete
    check(client, write, lives_id, 400, read_ack(folder).run_id)
    run = check(client, write, run_id, 201, read_ack(folder).run_id)
    assert "runner.end" not in run.data.tags and len(client.search_runs([read_ack(folder).experiment_id])) == 3
    assert not (paths["never"] / "journal").exists()


def test_sync_after_killed_uploader_sends_once(folder, uri, client, write, jobs):
    steps = 2000  # more than one call sends
    paths = [folder / str(number) for number in range(4)]
    with Publisher.start(folder, uri) as publisher, begin(folder, write) as journal:
        for path in paths:
            publisher.follow(path)
        running = [jobs(path, steps) for path in paths]
        for job in running:
            assert job.stdout.readline() == "half\n"
            go_on(job)
        wait_for(lambda: any(0 < read_ack(path).points_written < steps for path in paths))
        publisher._process.kill()
        publisher._process.wait()
        assert all(job.wait(60) == 0 for job in running)
        for path in paths:
            publisher.gone(path)
        write.end(journal)
        ack = publisher.finish()
        assert not ack.is_complete and "ended with exit code -9" in ack.error
        assert "ended with exit code -9" in publisher.ack_of(paths[0]).error
    acks = [sync(path, uri) for path in find_journals(folder)]
    assert len(acks) == 5 and all(found.is_complete for found in acks) and acks[0].run_id == read_ack(folder).run_id
    assert [found.points_written for found in acks[1:]] == [steps] * 4
    for found in acks[1:]:
        check(client, write, found.run_id, steps, acks[0].run_id)
    assert len(client.search_runs([acks[0].experiment_id])) == 5


def test_first_failure_names_the_experiment_once(folder, write):
    found = []
    with (
        Proxy(1, always("forbid")) as proxy,
        Publisher.start(folder, proxy.uri, grace_seconds=0) as publisher,
        begin(folder, write),
    ):
        wait_for(lambda: found.append(publisher.first_failure()) or found[-1])
        publisher._look_again_at = 0.0
        assert publisher.first_failure() is None
    assert found[-1].endswith(
        "not let you write to the experiment digits: ask its owner, or use tracking.experiment=OTHER"
    )


def test_full_pipe_loses_no_line(folder, uri, write, client):
    with Publisher.start(folder, uri) as publisher, begin(folder, write) as journal:
        process = psutil.Process(publisher._process.pid)
        process.suspend()
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
        try:
            paths = [folder / ("x" * 200 + str(number)) for number in range(300)]
            for path in paths:  # 65,536 bytes are full after about 200 paths
                publisher.follow(path)
            with Journal(paths[-1]) as job:
                write.start(job)
                write.rows(job, 1, 5)
            publisher.gone(paths[-1])
        finally:
            process.resume()
        write.end(journal)
        assert publisher.finish().is_complete and publisher._process.returncode == 0
    last = read_ack(paths[-1])
    assert last.died and last.points_written == 10 and client.get_run(last.run_id).info.status == "KILLED"
