"""A tracker of another package gets the journal of a run, as MLflow does, in a separate process."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from runner import cli
from runner.tracking import ack, publisher
from runner.tracking.ack import read_ack
from runner.tracking.journal import Journal
from runner.tracking.pipe import line_of
from runner.tracking.publisher import Publisher
from runner.tracking.sync import sync

#: the example of runner/tracking/README.md, and two ways to fail
EXAMPLE = (
    (Path(publisher.__file__).parent / "README.md").read_text().partition("# my_package.py\n")[2].partition("```")[0]
)
OTHER = f"""{EXAMPLE}
import time

class Failing(Lines):
    def points(self, points):
        if (self.file.parent / "hang").exists():
            time.sleep(1000)
        if (self.file.parent / "down").exists():
            raise ConnectionError("Connection refused")
        super().points(points)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Another package, which has the trackers `lines` and `failing`."""
    site = tmp_path / "site/other-1.0.dist-info"
    site.mkdir(parents=True)
    (site.parent / "other_tracker.py").write_text(OTHER)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    names = "lines = other_tracker:Lines\nfailing = other_tracker:Failing\n"
    (site / "entry_points.txt").write_text(f"[runner.trackers]\n{names}")
    monkeypatch.syspath_prepend(str(site.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.parent), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def run(folder, write, package):
    """A finished run that names a tracker, with ten windows of points."""
    with Journal(folder) as journal:
        write.start(journal, uid="u1", trackers=["failing"])
        for first in range(1, 101, 10):
            write.rows(journal, first, 10)
        write.end(journal)
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def kinds(folder):
    return [kind for kind, _ in lines(folder)]


def steps(folder):
    rows = [row for kind, value in lines(folder) if kind == "points" for row in value]
    return [step for step, values in rows if "train/loss" in values]


def test_tracker_of_another_package_gets_run(own_folder, package, capsys):
    command = ["model=mlp", "data=iris", "device=cpu", "train.num_epochs=2", "task.plots=false"]
    assert cli.main([*command, "hydra.run.dir=out", "tracking.trackers=[line]", "model.dropout=2"]) == 2
    shown = capsys.readouterr().err
    assert "tracking.trackers=[lines]" in shown and "model.dropout" in shown and not (own_folder / "out").exists()
    assert cli.main([*command, "hydra.run.dir=out", "tracking.trackers=[lines]"]) == 0
    out = own_folder / "out"
    wait_for(lambda: read_ack(out, "lines").is_complete)
    assert lines(out)[0] == ["begin", read_ack(out).uid] and lines(out)[-1] == ["end", "FINISHED"]
    assert {"dataset", "points", "model"} <= set(kinds(out)) and max(Counter(map(str, lines(out))).values()) == 1
    assert cli.main(["resume", "out", "train.num_epochs=3"]) == 0  # as the same run
    wait_for(lambda: read_ack(out, "lines").is_complete)
    assert kinds(out).count("end") == 2 and steps(out) == [1, 2, 3] and read_ack(out).is_complete


def test_jobs_of_sweep_share_a_process(own_folder, package):
    words = ["model=mlp", "data=iris", "device=cpu", "train.num_epochs=1", "task.plots=false", "sweep.batch=off"]
    assert cli.main(["-m", *words, "seed=1,2", "hydra.sweep.dir=sweep", "tracking.trackers=[lines]"]) == 0
    for name in ("sweep", "sweep/0", "sweep/1"):
        wait_for(lambda name=name: read_ack(own_folder / name, "lines").is_complete)
        assert kinds(own_folder / name)[0] == "begin" and lines(own_folder / name)[-1] == ["end", "FINISHED"]


def test_failing_tracker_waits_while_mlflow_continues(run, uri, capsys, monkeypatch):
    monkeypatch.setattr("runner.runs.sync.sync", partial(sync, grace_seconds=0.0))
    (run / "down").touch()
    before = sync(run, uri)
    assert before.is_complete and before.error is None
    assert cli.main(["sync", str(run), f"tracking.uri={uri}"]) == 1
    assert "tracker failing: the service does not answer" in capsys.readouterr().out
    (run / "down").unlink()
    assert cli.main(["sync", str(run), f"tracking.uri={uri}"]) == 0
    assert steps(run) == list(range(1, 101)) and lines(run)[-1] == ["end", "FINISHED"]
    assert sync(run, uri, tracker="failing").is_complete and len(steps(run)) == 100  # nothing is sent again


def test_hanging_tracker_holds_neither_mlflow_nor_end(run, uri, monkeypatch):
    monkeypatch.setattr(publisher, "OTHERS_SECONDS", 0.5)
    (run / "hang").touch()
    with Publisher.start(run, uri, trackers=["failing"]) as sender:
        other = sender._others[0]
        wait_for(lambda: kinds(run) if (run / "lines.jsonl").exists() else [])  # it has begun
        assert sender.finish().is_complete and other._process.poll() is None
        assert "tracker failing is still sending" in next(sender.unfinished_trackers())
        other.stop()
    assert not psutil.pid_exists(other._process.pid)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_killed_tracker_repeats_at_most_one_record(run, uri, monkeypatch, number):
    """A process that ends between a call and its acknowledgement."""
    with monkeypatch.context() as patch:
        writes = []

        def write_ack(folder, written, tracker):
            writes.append(tracker)
            if len(writes) > number:
                raise KeyboardInterrupt
            original(folder, written, tracker)

        original = ack.write_ack
        patch.setattr(ack, "write_ack", write_ack)
        with pytest.raises(KeyboardInterrupt):
            sync(run, uri, tracker="failing")
    assert sync(run, uri, tracker="failing").is_complete
    assert set(steps(run)) == set(range(1, 101)) and len(steps(run)) <= 110


def test_killed_run_ends_and_resumes_in_tracker(folder, write, package, uri):
    with Journal(folder) as journal:
        write.start(journal, uid="u1")
        write.rows(journal, 1, 10)
    sync(folder, uri, tracker="lines")
    assert lines(folder)[-1] == ["end", "KILLED"]
    with Journal(folder) as journal:
        write.start(journal, uid="u1")
        write.rows(journal, 11, 10)
        write.end(journal)
    sync(folder, uri, tracker="lines")
    assert kinds(folder) == ["begin", "points", "end", "begin", "begin", "points", "end"]
    assert steps(folder) == list(range(1, 21))


def test_tracker_that_left_is_reported(folder, write, uri):
    with Journal(folder) as journal:
        write.start(journal, trackers=["../other"])
        write.end(journal)
    result = sync(folder, uri, tracker="../other", grace_seconds=0.0)
    assert "no installed package has it" in result.error
    assert [file.name for file in (folder / "journal").glob("ack-*")] == ["ack-..%2Fother.json"]


def test_hanging_process_ends_after_deadline(run, uri):
    (run / "hang").touch()
    code = "import sys, runner.tracking.__main__ as m; m.ORPHAN_SECONDS = 0.5; sys.exit(m.main())"
    command = [sys.executable, "-c", code, "tracker", "failing"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.stdin.write(line_of(str(run), uri, 0.0))
        process.stdin.flush()
        wait_for(lambda: kinds(run) if (run / "lines.jsonl").exists() else [])  # it has begun
        process.stdin.close()
        try:
            assert process.wait(60) == publisher.NOT_DELIVERED
        finally:
            process.kill()
    assert not read_ack(run, "failing").is_complete
