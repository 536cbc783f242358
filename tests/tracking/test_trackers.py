"""A tracker of another package gets the journal of a run, as MLflow does."""

import json
import os
from collections import Counter

import pytest

from runner import cli
from runner.tracking import ack, trackers
from runner.tracking.ack import read_ack, read_error
from runner.tracking.journal import Journal
from runner.tracking.sync import sync

OTHER = """
import json
from runner.tracking.journal import Points

class Lines:
    def begin(self, folder, start):
        self.file = folder / "lines.jsonl"
        self.write("begin", start["uid"])

    def send(self, record):
        if (self.file.parent / "down").exists():
            raise ConnectionError("Connection refused")
        is_points = isinstance(record.data, Points)
        self.write(record.kind, record.offset, record.data.steps.tolist() if is_points else None)

    def end(self, status):
        self.write("end", status)

    def write(self, *entry):
        with self.file.open("a") as file:
            print(json.dumps(entry), file=file)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Another package, which has the tracker `lines`."""
    site = tmp_path / "site/other-1.0.dist-info"
    site.mkdir(parents=True)
    (site.parent / "other_tracker.py").write_text(OTHER)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text("[runner.trackers]\nlines = other_tracker:Lines\n")
    monkeypatch.syspath_prepend(str(site.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.parent), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def run(folder, write, package):
    """A finished run that names the tracker, with ten windows of points."""
    with Journal(folder) as journal:
        write.start(journal, uid="u1", trackers=["lines"])
        for first in range(1, 101, 10):
            write.rows(journal, first, 10)
        write.end(journal)
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def steps(folder):
    return [step for kind, *_, last in lines(folder) if kind == "points" for step in last]


def test_tracker_of_another_package_gets_run(own_folder, package, capsys):
    command = ["model=mlp", "data=iris", "device=cpu", "train.num_epochs=2", "task.plots=false", "hydra.run.dir=out"]
    assert cli.main([*command, "tracking.trackers=[line]"]) == 2
    assert "tracking.trackers=[lines]" in capsys.readouterr().err
    assert cli.main([*command, "tracking.trackers=[lines]"]) == 0
    out = own_folder / "out"
    assert lines(out)[0] == ["begin", read_ack(out).uid] and lines(out)[-1] == ["end", "FINISHED"]
    assert {"dataset", "points", "model"} <= {kind for kind, *_ in lines(out)}
    assert read_ack(out).is_complete and trackers.trackers_of(out)[0].is_complete
    assert max(Counter(map(str, lines(out))).values()) == 1


def test_failing_tracker_waits_and_mlflow_continues(run, uri):
    (run / "down").touch()
    before = sync(run, uri, grace_seconds=0.0)
    assert before.is_complete and before.error == "tracker lines: tracker:lines does not answer" == read_error(run)
    (run / "down").unlink()
    after = sync(run, uri)
    assert after.error is None and steps(run) == list(range(1, 101)) and lines(run)[-1] == ["end", "FINISHED"]
    assert sync(run, uri).error is None and len(steps(run)) == 100  # nothing is sent again


@pytest.mark.parametrize("number", [1, 2, 6])
def test_killed_tracker_repeats_at_most_one_record(run, uri, monkeypatch, number):
    """A process that ends between a call and its acknowledgement."""
    with monkeypatch.context() as patch:
        writes = []

        def write_ack(folder, written, file):
            writes.extend([file] * ("lines" in file))
            if len(writes) > number:
                raise KeyboardInterrupt
            original(folder, written, file)

        original = ack.write_ack
        patch.setattr(ack, "write_ack", write_ack)
        with pytest.raises(KeyboardInterrupt):
            sync(run, uri)
    assert sync(run, uri).error is None
    offsets = [entry[1] for entry in lines(run) if entry[0] == "points"]
    assert len(set(offsets)) == 10 and len(offsets) <= 11 and set(steps(run)) == set(range(1, 101))


def test_killed_run_ends_and_resumes_in_tracker(folder, write, package, uri):
    with Journal(folder) as journal:
        write.start(journal, uid="u1", trackers=["lines"])
        write.rows(journal, 1, 10)
    sync(folder, uri)
    assert lines(folder)[-1] == ["end", "KILLED"]
    with Journal(folder) as journal:
        write.start(journal, uid="u1", trackers=["lines"])
        write.rows(journal, 11, 10)
        write.end(journal)
    sync(folder, uri)
    kinds = [entry[0] for entry in lines(folder)]
    assert kinds == ["begin", "points", "end", "begin", "begin", "points", "end"] and steps(folder) == list(
        range(1, 21)
    )


def test_tracker_no_package_has_is_reported(folder, write, uri):
    with Journal(folder) as journal:
        write.start(journal, trackers=["../other"])
        write.end(journal)
    got = sync(folder, uri, grace_seconds=0.0)
    assert got.is_complete and "no installed package has it" in got.error
    assert [file.name for file in (folder / "journal").glob("ack-*")] == ["ack-..%2Fother.json"]
