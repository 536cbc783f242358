import io
import re

import numpy as np
import pytest
from rich.console import Console
from synthetic_sweep import Folder

from runner.experiment.summary import Summary
from runner.sweep import progress_table
from runner.sweep.jobs import ledger
from runner.sweep.progress_table import Table, Watch
from runner.tracking.journal import Journal


def test_a_watch_follows_a_journal_as_it_grows(tmp_path):
    watch = Watch(tmp_path)
    watch.look()
    assert (watch.step, watch.num_steps, watch.values) == (0, 0, {})
    with Journal(tmp_path) as journal:
        journal.event("start", uid="u", params={"facts.num_steps": "40"})
        journal.points(("train/loss", "train/accuracy"), [1, 2], [5, 6], np.array([[2.0, 0.1], [1.5, 0.2]]))
        watch.look()
        assert (watch.step, watch.num_steps, watch.values) == (2, 40, {"train/loss": 1.5, "train/accuracy": 0.2})
        journal.points(("val/loss",), [2], [7], np.array([[1.0]]))
        watch.look()
        assert watch.values["val/loss"] == 1.0 and watch.step == 2
        read = watch._offset
        watch.look()
        assert watch._offset == read == journal.path.stat().st_size


@pytest.fixture
def clock(monkeypatch):
    passed = [1000.0]
    monkeypatch.setattr(progress_table.time, "monotonic", lambda: passed[0])
    return passed


def begun_sweep(folder, clock, console):
    """Six jobs: two have ended after 10 s, two have been running since then, one of them at 25 %, and two wait."""
    made = Folder(folder, ("seed=range(6)",))
    for number in range(6):
        made.job((f"seed={number}",) if number else (), "planned", name=f"seed={number}" if number else "")
    sweep, table = ledger.read(made.close()), Table(console)
    jobs = list(sweep.jobs.values())
    with table:
        for job in jobs[:2]:
            job.state, job.device = "running", "cpu"
        table.show(sweep)
        clock[0] += 10
        jobs[0].state, jobs[1].state, jobs[1].error = "finished", "failed", "ValueError: x"
        table.ended(jobs[0], Summary(best={"metric": "val/loss", "value": 0.25, "step": 4}, metrics={"val/loss": 0.5}))
        table.ended(jobs[1], Summary())
        for job in jobs[2:4]:
            job.state, job.device = "running", "cpu"
        for job, step in ((jobs[2], 5), (jobs[3], 0)):
            with Journal(sweep.folder_of(job)) as journal:
                journal.event("start", uid=str(job.number), params={"facts.num_steps": "20"})
                if step:
                    journal.points(("train/loss",), [step], [7], np.array([[2.0]]))
                    journal.points(("val/loss",), [step], [7], np.array([[0.125]]))
        table.show(sweep)
        clock[0] += 5
        table.show(sweep)
    return console.file.getvalue()


def test_table_shows_progress_best_job_and_eta(tmp_path, clock):
    said = begun_sweep(tmp_path, clock, Console(file=io.StringIO(), width=100, force_terminal=True))
    frame = said[said.rindex("overrides") :]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in frame.splitlines()]
    assert lines[1] == ["2", "seed=2", "cpu", "━━", "25%", "0.1250", "5", "s"]
    assert lines[2] == ["3", "seed=3", "cpu", "0%", "5", "s"]
    assert lines[3] == ["1", "seed=1", "cpu", "failed:", "ValueError:", "x", "10", "s"]
    assert lines[4] == ["0", "(defaults)", "cpu", "finished", "0.2500", "10", "s"]
    # the running jobs have 15 s and 5 s left; they take 20 s and 10 s, as do the others
    assert " ".join(lines[5]) == "2/6 done · 1 failed · ETA 22 s"
    assert "\x1b[1mseed=2" in frame and "\x1b[1mseed=3" not in frame


def test_pipe_gets_lines_without_control_characters(tmp_path, clock):
    said = begun_sweep(tmp_path, clock, Console(file=io.StringIO(), width=100))
    assert said.splitlines() == [
        "job 0 started on cpu: (defaults)",
        "job 1 started on cpu: seed=1",
        "job 0 finished  val/loss 0.2500",
        "job 1 failed: ValueError: x",
        "job 2 started on cpu: seed=2",
        "job 3 started on cpu: seed=3",
    ]
