"""The content of a sweep's run in MLflow, with the best job of a resumed sweep, and the information that its jobs get about it."""

import math
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
from runner.sweep.report.build import read_report
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events, read_points
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
    tracking = {
        "enabled": True,
        "uri": "sqlite:///mlflow.db",
        "grace_seconds": 0,
        "experiment": None,
        "trackers": [],
        "tensorboard": False,
    }
    tracking |= {"tags": {"team": "vision", "paper": True}, "description": "ours"}
    return OmegaConf.create({"tracking": tracking, "data": {"name": name}, "name": None})


def test_resumed_sweep_keeps_its_experiment(sweep):
    """The first remaining job may have other data than the first job of the sweep, and thus another experiment."""
    jobs = [PreparedJob(job, config(job.name.partition("=")[2])) for job in sweep.jobs.values()]
    for left, sweep.max_seeds in ((jobs, None), (jobs[1:], 16), ([], 64)):
        with Parent.open(sweep, config("wine"), left, is_here=True) as parent:
            assert parent.context.member.experiment == "iris"
    starts = [event for event in read_events(sweep.folder) if event["kind"] == "start"]
    assert [event["experiment"] for event in starts] == ["iris"] * 3
    assert [event["tags"].get("max_seeds") for event in starts] == [None, "16", "64"]  # `compare ID` uses the tag
    assert starts[0]["tags"]["team"] == "vision" and starts[0]["tags"]["paper"] == "true"


def test_untracked_sweep_has_a_journal(sweep, monkeypatch):
    """Without it, its jobs would wait for it forever after sync has sent them."""
    monkeypatch.setattr(mlflow_parent.Publisher, "start", lambda *_, **__: pytest.fail("nothing is to be published"))
    cfg = config("iris")
    cfg.tracking.enabled = False
    with Parent.open(sweep, cfg, [], is_here=True) as parent:
        assert parent.publisher is None
        parent.end("FINISHED", build.write(sweep.folder), stop=Stop(), say=pytest.fail)
    events = read_events(sweep.folder)
    assert [event["kind"] for event in events] == ["start", "tags", "artifact", "artifact", "artifact", "end"]
    notes = [event["tags"]["mlflow.note.content"] for event in events[:2]]
    assert notes[0].startswith("ours\n\nA sweep") and notes[1].startswith("ours\n\n") and "A sweep" in notes[1]
    assert events[0]["uid"] == parent.context.member.uid and origin.store_of(sweep.folder) == ""


LOSS_AND_SPEED = (
    {"metric": "val/loss", "direction": "minimize"},
    {"metric": "speed/steps_per_second", "direction": "maximize"},
)


def job(made, state="finished", *, best=None, **metrics):
    """Write a job with these last metrics, `a_b` for a/b; best: Of val/loss."""
    kept = {"metric": "val/loss", "mode": "min", "value": best, "step": 3}
    found = {name.replace("_", "/", 1): value for name, value in metrics.items()}
    number = made.number
    made.job((f"seed={number}",), state, device="cpu", summary={"metrics": found, "best": kept})


def write_outcome(folder, *, run_id="r"):
    report = read_report(folder)
    with Journal(folder) as journal:
        tags = mlflow_parent.tags_of(report, run_id=run_id, config=config("iris"))
        mlflow_parent.write_outcome(journal, folder, report, tags=tags)


@pytest.fixture
def made(tmp_path):
    made = Folder(tmp_path / "sweep", ("seed=range(4)",))
    yield made
    made.close()


def test_outcome_has_best_jobs_metrics(made):
    job(made, best=0.5, val_loss=0.6, test_accuracy=0.8)
    job(made, best=0.3, val_loss=0.4, test_accuracy=0.9)
    job(made, "failed", best=0.1, val_loss=0.1)
    write_outcome(made.path)
    recorded = {"val/loss": [(2, 0.4)], "test/accuracy": [(2, 0.9)], "best/val/loss": [(2, 0.3)]}
    assert read_points(made.path) == recorded
    (event,) = read_events(made.path)
    names = {"best_job": "1", "best_job_name": "seed=1", "best_job_run_id": "r", "goals": "min val/loss"}
    text = event["tags"].pop(mlflow_parent.NOTE)
    assert event == {"kind": "tags", "tags": names}
    _, best, command, rest = text.split("\n\n")
    assert best == "**The best job is 1, seed=1**: val/loss 0.3000"
    assert command == "A sweep: `python -m runner -m seed=range(4)`"
    assert rest.startswith("3 jobs: 2 finished, 1 failed. ") and "report.html" in rest


def test_resumed_sweep_writes_only_new_values(made):
    job(made, best=0.5, val_loss=0.6, val_auc=0.7)
    write_outcome(made.path, run_id=None)
    assert read_events(made.path)[-1]["tags"]["best_job_run_id"] == "unknown"
    before = read_points(made.path)
    for _ in range(2):
        write_outcome(made.path)
        assert read_points(made.path) == before and len(read_events(made.path)) == 2
    job(made, best=0.4, val_loss=0.9)
    for _ in range(2):
        write_outcome(made.path)
    points = read_points(made.path)
    assert points["val/loss"] == [(1, 0.6), (2, 0.9)] and points["best/val/loss"] == [(1, 0.5), (2, 0.4)]
    assert points["val/auc"][0] == (1, 0.7) and math.isnan(points["val/auc"][1][1])  # the other job's value
    assert [event["tags"]["best_job"] for event in read_events(made.path)] == ["0", "0", "1"]


def test_outcome_of_several_goals_has_front(tmp_path):
    made = Folder(tmp_path / "found", objectives=LOSS_AND_SPEED)
    for loss, speed in ((0.5, 100.0), (0.3, 50.0), (0.6, 90.0)):
        job(made, best=loss, val_loss=loss + 0.1, speed_steps_per_second=speed)
    write_outcome(made.close())
    last = {name: points[-1][1] for name, points in read_points(made.path).items()}
    bests = {"best/val/loss": 0.3, "best/speed/steps_per_second": 100.0, "best/pareto_front": 2.0}
    assert last == {"val/loss": 0.4, "speed/steps_per_second": 50.0} | bests
    (event,) = read_events(made.path)
    assert (event["tags"]["goals"], event["tags"]["best_job"]) == ("min val/loss, max speed/steps_per_second", "1")


def test_outcome_after_kill_is_completed(made):
    job(made, best=0.5, val_loss=0.6)
    with Journal(made.path) as journal:  # killed after the tags were written
        journal.event("tags", tags=mlflow_parent.tags_of(read_report(made.path), run_id="r", config=config("iris")))
    write_outcome(made.path)
    assert len(read_events(made.path)) == 1 and read_points(made.path)["val/loss"] == [(1, 0.6)]


def test_outcome_without_finished_job_has_note(made):
    job(made, "failed", best=0.1, val_loss=0.1)
    job(made, "killed")
    write_outcome(made.path)
    (event,) = read_events(made.path)
    assert not read_points(made.path) and list(event["tags"]) == [mlflow_parent.NOTE]
