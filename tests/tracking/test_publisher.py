import os
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
from waiting import LONGEST, wait_for

from runner.tracking import publisher as module
from runner.tracking.ack import FILE, Ack, read_ack, write_ack
from runner.tracking.ahead import Ahead
from runner.tracking.journal import Journal
from runner.tracking.mlflow_store import open_store
from runner.tracking.publisher import LOG, Publisher

pytestmark = pytest.mark.slow

#: starts with preloaded modules; the other tests start the real process
beside = pytest.mark.usefixtures("warm_programs")

TRAINING = """
import sys, time
from pathlib import Path
import numpy as np
from runner.tracking.journal import Journal
from runner.tracking.mlflow_store import open_store
from runner.tracking.publisher import Publisher
folder, uri = Path(sys.argv[1]), sys.argv[2]
with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:
    switches = dict(system_metrics=True)
    named = dict(uid="u1", experiment="digits", run_name="r", start_ms=int(time.time() * 1000))
    journal.event("start", params={"lr": 0.1}, tags={}, **named, **switches)
    while publisher.ack().run_id is None:
        time.sleep(0.02)
    for step in range(1, 10**6):
        journal.points(("loss",), [step], [1_700_000_000_000 + step], [[step / 2]])
        print(publisher._process.pid, flush=True)
        time.sleep(0.01)
"""


@pytest.fixture
def halt():
    """Stop a process like Ctrl-Z; a process that a failing test leaves stopped is ended."""
    halted = []

    def stop(process):
        halted.append(process)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)

    yield stop
    for process in halted:
        if process.poll() is None:
            process.kill()
            process.wait()


@beside
def test_run_is_sent_during_training(folder, uri, client, write, open_fds):
    before = open_fds()
    with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:
        child = psutil.Process(publisher._process.pid)
        write.start(journal, system_metrics=True)
        wait_for(lambda: publisher.ack().run_id)
        child.send_signal(signal.SIGINT)  # Ctrl-C in the terminal
        assert os.getsid(child.pid) == child.pid  # which the process does not even receive
        assert uri not in " ".join(publisher._process.args)  # `ps` shows the arguments
        for step in range(1, 50):
            write.rows(journal, step * 10, 10)
        write.end(journal)
        ack = publisher.finish(grace_seconds=10)
        assert publisher._process.returncode == 0
    assert ack.is_complete and ack.points_written == 980 and ack.warnings == () and ack.error is None
    run = client.get_run(ack.run_id)
    assert run.info.status == "FINISHED" and "system/cpu_utilization_percentage" in run.data.metrics
    assert [step for step, *_ in write.history(client, ack.run_id, "train/loss")] == list(range(10, 500))
    assert (folder / LOG).read_text() == "" and not child.is_running()
    assert open_fds() == before


@beside
def test_killed_training_leaves_points_and_status(folder, uri, client, write, tmp_path):
    run = [sys.executable, "-c", TRAINING, str(folder), uri]
    training = subprocess.Popen(run, stdout=subprocess.PIPE, text=True)
    pids = {training.stdout.readline() for _ in range(100)}
    training.send_signal(signal.SIGKILL)
    training.communicate()
    child = psutil.Process(int(pids.pop()))
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    ack = read_ack(folder)
    run = client.get_run(ack.run_id)
    assert run.info.status == "KILLED" and run.data.tags["runner.end"] == "the process was killed"
    assert ack.state == "died" and ack.points_pending == 0 and ack.points_written >= 100
    assert len(write.history(client, ack.run_id, "loss")) == ack.points_written
    with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:  # resumed
        write.start(journal, uid="u1")
        wait_for(lambda: client.get_run(ack.run_id).info.status == "RUNNING")
        write.rows(journal, 10**6, 5, names=("loss",))
        write.end(journal)
        second = publisher.finish()
    assert second.run_id == ack.run_id and second.is_complete and second.points_written == ack.points_written + 5
    run = client.get_run(ack.run_id)
    assert run.info.status == "FINISHED" and "runner.end" not in run.data.tags


def test_run_without_start_leaves_nothing(folder, tmp_path):
    with Publisher.start(folder, f"sqlite:///{tmp_path}/none.db") as publisher:
        process = publisher._process
    assert process.returncode == -signal.SIGTERM
    assert not (tmp_path / "none.db").exists()


@beside
def test_ctrl_c_during_wait_leaves_the_process(folder, uri, write, halt):
    with Journal(folder) as journal:
        publisher = Publisher.start(folder, uri)
        write.start(journal)
        write.rows(journal, 1, 5)
        write.end(journal)
    wait_for(lambda: read_ack(folder).run_id)
    halt(publisher._process)
    ctrl_c = threading.Timer(0.3, signal.raise_signal, args=(signal.SIGINT,))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt), publisher:
        publisher.finish()
    ctrl_c.join()
    assert publisher._process.returncode is None
    publisher._process.send_signal(signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "runner-publisher":
            thread.join(30)
    assert publisher._process.returncode == 0 and publisher.ack().is_complete


@beside
def test_stuck_process_ends_the_wait(folder, uri, write, halt, monkeypatch):
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.5)
    with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:
        write.start(journal)
        write.end(journal)
        halt(publisher._process)
        assert not publisher.finish().is_complete
        publisher._process.kill()
    for thread in threading.enumerate():
        if thread.name == "runner-publisher":
            thread.join(30)


@beside
def test_follow_never_waits_or_raises(folder, uri, write, halt):
    with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:
        write.start(journal)
        halt(publisher._process)
        for _ in range(10_000):  # the pipe holds 65,536 bytes, and nothing reads it
            publisher.follow(folder / "a")
        publisher._process.kill()
        publisher._process.wait()
        publisher.gone(folder / "a")
        write.rows(journal, 1, 5)
        ack = publisher.finish()
        publisher.gone(folder / "a")
    assert ack.points_pending == 10 and "ended with exit code -9" in ack.error and str(folder / LOG) in ack.error


def test_failed_process_start_fails_no_run(folder, uri, write, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:
        write.start(journal)
        write.rows(journal, 1, 5)
        ack = publisher.finish()
    assert ack.error == "the uploader could not be started" and ack.points_pending == 10


def test_finish_waits_while_a_run_progresses(folder, monkeypatch):
    """The process writes the acknowledgement of another run every second, for ten seconds, and then nothing."""
    now, writes = [0.0], iter(range(1, 11))

    def ends_within(seconds):
        now[0] += seconds
        os.utime(folder / "a" / FILE, (next(writes, 10),) * 2)
        return False

    publisher = Publisher(folder, None)
    publisher.follow(folder / "a")
    write_ack(folder / "a", Ack())
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "STUCK_SECONDS", 2.5)
    monkeypatch.setattr(publisher, "_process", SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(publisher, "_ends_within", ends_within)
    publisher.finish()
    assert 12 <= now[0] <= 14


@beside
def test_silent_store_ends_wait_without_password(folder, write):
    uri = "http://ann:s3cret@127.0.0.1:9"  # the discard port, without a server
    with Publisher.start(folder, uri, grace_seconds=3000) as publisher, Journal(folder) as journal:
        write.start(journal)
        write.rows(journal, 1, 5)
        write.end(journal)
        wait_for(lambda: publisher.ack().error)
        assert "s3cret" not in " ".join(publisher._process.args)
        ack = publisher.finish(grace_seconds=1)
        assert publisher._process.returncode == 3
    assert ack.error == "http://ann:***@127.0.0.1:9 does not answer" and ack.points_pending == 10 and not ack.ended
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(written) >= 3 and not any(b"s3cret" in content for content in written)
    assert "Connection refused" in (folder / LOG).read_text()


def test_user_modules_of_same_names_are_ignored(folder, uri, write, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "runner").mkdir(parents=True)
    for name in ("runner/__init__.py", "mlflow.py", "random.py", "torch.py"):
        (home / name).write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(home)
    with Publisher.start(folder, uri) as publisher, Journal(folder) as journal:
        write.start(journal)
        write.end(journal)
        assert publisher.finish().is_complete


@beside
def test_relative_store_is_in_current_directory(folder, write, tmp_path, monkeypatch, empty_store):
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, "mlflow.db")
    with Publisher.start(folder.relative_to(tmp_path), "sqlite:///mlflow.db") as publisher, Journal(folder) as journal:
        write.start(journal)
        (folder / "rerun.yaml").write_text("seed: 0")
        journal.event("artifact", path="rerun.yaml", to="")
        write.end(journal)
        ack = publisher.finish()
    assert ack.is_complete and ack.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert open_store(ack.uri).get_run(ack.run_id).info.status == "FINISHED"
    assert (tmp_path / "mlartifacts" / ack.run_id / "artifacts" / "rerun.yaml").is_file()


def test_unused_process_ends_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ahead = Ahead("sqlite:///mlflow.db")
    process = ahead.taken()
    assert ahead.taken() is None
    process.stdin.close()  # like a run that is killed during its checks
    assert process.wait(LONGEST) == 0
    assert list(tmp_path.iterdir()) == []


def test_unused_process_is_closed_at_once():
    ahead = Ahead("sqlite:///mlflow.db")
    child = psutil.Process(ahead._process.pid)  # a fork of the preloaded process is not a child of this process
    ahead.close()
    assert not child.is_running()
    ahead.close()


@beside
def test_process_started_ahead_gets_the_run(tmp_path, uri):
    ahead = Ahead(uri)
    number = ahead._process.pid
    with Publisher.start(tmp_path / "run", uri, ahead=ahead) as publisher, Journal(tmp_path / "run") as journal:
        assert publisher._process.pid == number
        journal.event("start", params={}, tags={}, uid="u1", experiment="e", run_name="r", start_ms=1)
        journal.event("end", status="FINISHED", end_ms=2)
        assert publisher.finish().error is None
    assert open_store(uri).get_run(read_ack(tmp_path / "run").run_id).info.status == "FINISHED"
