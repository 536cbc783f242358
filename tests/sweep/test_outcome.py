"""The values of a sweep's run: the best job's metrics, once, and another job's after the sweep was resumed."""

import math

import pytest
from synthetic_sweep import Folder

from runner.sweep import outcome
from runner.sweep.report.build import read_report
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events, read_points

LOSS_AND_SPEED = (
    {"metric": "val/loss", "direction": "minimize"},
    {"metric": "speed/steps_per_second", "direction": "maximize"},
)


def job(sweep, state="finished", *, best=None, **metrics):
    """Write a job with these last metrics, `a_b` for a/b; best: Of val/loss."""
    kept = {"metric": "val/loss", "mode": "min", "value": best, "step": 3}
    found = {name.replace("_", "/", 1): value for name, value in metrics.items()}
    number = sweep.number
    sweep.job((f"seed={number}",), state, device="cpu", summary={"metrics": found, "best": kept})


def tell(folder, *, run_id="r"):
    with Journal(folder) as journal:
        outcome.tell(journal, folder, read_report(folder), run_id=run_id)


@pytest.fixture
def sweep(tmp_path):
    made = Folder(tmp_path / "sweep", ("seed=range(4)",))
    yield made
    made.close()


def test_the_best_jobs_last_metrics_and_its_name(sweep):
    job(sweep, best=0.5, val_loss=0.6, test_accuracy=0.8)
    job(sweep, best=0.3, val_loss=0.4, test_accuracy=0.9)
    job(sweep, "failed", best=0.1, val_loss=0.1)
    tell(sweep.path)
    told = {"val/loss": [(2, 0.4)], "test/accuracy": [(2, 0.9)], "best/val/loss": [(2, 0.3)]}
    assert read_points(sweep.path) == told
    (event,) = read_events(sweep.path)
    names = {"best_job": "1", "best_job_name": "seed=1", "best_job_run_id": "r", "goals": "min val/loss"}
    text = event["tags"].pop(outcome.NOTE)
    assert event == {"kind": "tags", "tags": names}
    best, command, counts, table, rest = text.split("\n\n")
    assert best == "**The best job is 1, seed=1**: val/loss 0.3000"
    assert command == "A sweep: `python -m runner -m seed=range(4)`" and counts == "3 jobs: 2 finished, 1 failed"
    title, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert title[:3] == ["job", "name", "state"] and [row[0] for row in rows] == ["1", "0", "2"]
    assert rows[0][title.index("val/loss")] == "0.3000" and "report.html" in rest


def test_a_long_table_is_cut(sweep):
    for _ in range(outcome.MOST_ROWS + 3):
        job(sweep, "failed")
    tell(sweep.path)
    (event,) = read_events(sweep.path)
    assert event["tags"][outcome.NOTE].count("failed |") == outcome.MOST_ROWS
    assert event["tags"][outcome.NOTE].endswith("3 more jobs are in report.html, an artifact.")


def test_a_sweep_that_goes_on_tells_what_is_new_and_nothing_twice(sweep):
    job(sweep, best=0.5, val_loss=0.6, val_auc=0.7)
    tell(sweep.path, run_id=None)
    assert read_events(sweep.path)[-1]["tags"]["best_job_run_id"] == "unknown"
    before = read_points(sweep.path)
    for _ in range(2):
        tell(sweep.path)
        assert read_points(sweep.path) == before and len(read_events(sweep.path)) == 2
    job(sweep, best=0.4, val_loss=0.9)
    for _ in range(2):
        tell(sweep.path)
    points = read_points(sweep.path)
    assert points["val/loss"] == [(1, 0.6), (2, 0.9)] and points["best/val/loss"] == [(1, 0.5), (2, 0.4)]
    assert points["val/auc"][0] == (1, 0.7) and math.isnan(points["val/auc"][1][1])  # the other job's value
    assert [event["tags"]["best_job"] for event in read_events(sweep.path)] == ["0", "0", "1"]


def test_what_a_kill_came_before_is_told_the_next_time(sweep):
    job(sweep, best=0.5, val_loss=0.6)
    with Journal(sweep.path) as journal:  # killed after the tags were written
        journal.event("tags", tags=outcome.tags_of(read_report(sweep.path), run_id="r"))
    tell(sweep.path)
    assert len(read_events(sweep.path)) == 1 and read_points(sweep.path)["val/loss"] == [(1, 0.6)]


def test_several_goals_have_the_front_and_the_best_of_each(tmp_path):
    made = Folder(tmp_path / "found", objectives=LOSS_AND_SPEED)
    for loss, speed in ((0.5, 100.0), (0.3, 50.0), (0.6, 90.0)):
        job(made, best=loss, val_loss=loss + 0.1, speed_steps_per_second=speed)
    tell(made.close())
    last = {name: points[-1][1] for name, points in read_points(made.path).items()}
    bests = {"best/val/loss": 0.3, "best/speed/steps_per_second": 100.0, "best/pareto_front": 2.0}
    assert last == {"val/loss": 0.4, "speed/steps_per_second": 50.0} | bests
    (event,) = read_events(made.path)
    assert (event["tags"]["goals"], event["tags"]["best_job"]) == ("min val/loss, max speed/steps_per_second", "1")


def test_without_a_job_that_finished_there_is_nothing_to_tell_but_the_table(sweep):
    job(sweep, "failed", best=0.1, val_loss=0.1)
    job(sweep, "killed")
    tell(sweep.path)
    (event,) = read_events(sweep.path)
    assert not read_points(sweep.path) and list(event["tags"]) == [outcome.NOTE]
