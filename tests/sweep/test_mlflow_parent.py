"""The content of a sweep's run in MLflow, and the information that its jobs get about it."""

from contextlib import nullcontext

import pytest
from omegaconf import OmegaConf
from synthetic_sweep import Folder

from runner.config import origin
from runner.sweep import mlflow_parent
from runner.sweep.jobs import ledger
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.mlflow_parent import Parent
from runner.sweep.report import build
from runner.tracking.journal_reader import read_events
from runner.training.signals import Stop


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep over two data sets; nothing is published."""
    monkeypatch.setattr(mlflow_parent.Publisher, "start", lambda *_, **__: nullcontext())
    made = Folder(tmp_path / "sweep", ("data=iris,digits",))
    for name in ("iris", "digits"):
        made.job((f"data={name}",), "planned")
    return ledger.read(made.close())


def config(name):
    tracking = {"enabled": True, "uri": "sqlite:///mlflow.db", "grace_seconds": 0, "experiment": None}
    tracking |= {"tags": {"team": "vision", "paper": True}, "description": "ours"}
    return OmegaConf.create({"tracking": tracking, "data": {"name": name}, "name": None})


def test_a_sweep_that_goes_on_is_looked_for_where_its_run_is(sweep):
    """The first remaining job may have other data than the first job of the sweep, and thus another experiment."""
    jobs = [PreparedJob(job, config(job.name.partition("=")[2])) for job in sweep.jobs.values()]
    for left, sweep.max_seeds in ((jobs, None), (jobs[1:], 16), ([], 64)):
        with Parent.open(sweep, config("wine"), left, follows=True) as parent:
            assert parent.assigned["experiment"] == "iris"
    starts = [event for event in read_events(sweep.folder) if event["kind"] == "start"]
    assert [event["experiment"] for event in starts] == ["iris"] * 3
    assert [event["tags"].get("max_seeds") for event in starts] == [None, "16", "64"]  # `compare ID` uses the tag
    assert starts[0]["tags"]["team"] == "vision" and starts[0]["tags"]["paper"] == "true"


def test_one_that_is_not_tracked_keeps_a_journal_as_its_jobs_do(sweep, monkeypatch):
    """Without it, its jobs would wait for it forever after sync has sent them."""
    monkeypatch.setattr(mlflow_parent.Publisher, "start", lambda *_, **__: pytest.fail("nothing is to be published"))
    cfg = config("iris")
    cfg.tracking.enabled = False
    with Parent.open(sweep, cfg, [], follows=True) as parent:
        assert parent.publisher is None
        parent.end("FINISHED", build.write(sweep.folder), stop=Stop(), say=pytest.fail)
    events = read_events(sweep.folder)
    assert [event["kind"] for event in events] == ["start", "tags", "artifact", "artifact", "artifact", "end"]
    notes = [event["tags"]["mlflow.note.content"] for event in events[:2]]
    assert notes[0].startswith("ours\n\nA sweep") and notes[1].startswith("ours\n\n") and "A sweep" in notes[1]
    assert events[0]["uid"] == parent.assigned["uid"] and origin.store_of(sweep.folder) == ""
