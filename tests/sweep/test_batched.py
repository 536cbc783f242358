"""Sweeps whose jobs are trained together, as a user starts them: each job is a normal run, also after a kill."""

import json
import os
import re
import signal

import psutil
import pytest
import seeded
import torch
from mlflow.tracking import MlflowClient
from waiting import wait_for

from runner.experiment.summary import Summary
from runner.sweep.jobs import ledger
from runner.tracking.journal_reader import read_series

SMALL = ("model=mlp", "model.hidden_sizes=[16]", "model.dropout=0.2", "device=cpu", "train.num_epochs=2")
SEEDS = "seed=range(4)"
QUIET = ("tracking.enabled=false", "task.plots=false")


@pytest.fixture
def sweep(warm):
    """Run a sweep in a directory that exits with 0, and return its output."""

    def run(folder, *words, name="swept"):
        process = warm.command(folder, "-m", *words, f"hydra.sweep.dir={name}")
        said, _ = process.communicate()
        assert process.returncode == 0, said
        return said

    return run


def points(folder):
    """Return the measured points, without those that depend on a clock."""
    return {
        name: (steps.tolist(), values.tolist())
        for name, (steps, _, values) in read_series(folder).items()
        if name.startswith(("train/", "val/", "test/"))
    }


def weights(folder):
    return torch.load(folder / "checkpoints/last.pt", weights_only=True)["model"]


def assert_near(one, other):
    assert points(one).keys() == points(other).keys()
    for name, (steps, values) in points(one).items():
        assert points(other)[name][0] == steps
        assert points(other)[name][1] == pytest.approx(values, rel=1e-5)
    for name, value in weights(one).items():
        assert torch.allclose(weights(other)[name], value, rtol=1e-5, atol=1e-6)


def test_each_job_is_the_run_that_it_is_alone(own_folder, sweep, warm):
    rates = "optimizer.lr=1e-3,3e-3"
    said = sweep(own_folder, *SMALL, "seed=0,1", rates, name="together")
    assert "batch    4 jobs differ only in numbers: trained together, in one group" in said
    alone = sweep(own_folder, *SMALL, "seed=0,1", rates, "sweep.batch=off", *QUIET, name="alone")
    assert "batch  " not in alone
    jobs = ledger.read(own_folder / "together").jobs.values()
    assert [job.state for job in jobs] == ["finished"] * 4
    found = [own_folder / "together" / job.folder_name for job in jobs]
    for folder in found:
        assert_near(folder, own_folder / "alone" / folder.name)
        log = (folder / "console.log").read_text()
        assert re.search(r"of 4 jobs compute together", log)
        # the sweep publishes the jobs and reports this itself
        assert "by the sweep\n" in log and "not reached" not in log
        assert (folder / "runner.log").read_text().count("epoch    2/2") == 1
        assert (folder / ".hydra/overrides.yaml").read_text().count("seed=") == 1
    summaries = [Summary.read(folder) for folder in found]
    best = min(summaries, key=lambda each: each.best["value"])
    for folder, summary in zip(found, summaries, strict=True):
        assert (folder / "plots").exists() == (summary is best)  # only the best run has plots and a model
    runs = MlflowClient(f"sqlite:///{own_folder}/mlflow.db").search_runs(["1"])
    assert len(runs) == 5 and {run.info.status for run in runs} == {"FINISHED"}  # including the sweep's run
    by_id = {run.info.run_id: run for run in runs}
    for summary in summaries:
        assert by_id[summary.run_id].data.metrics["val/loss"] == pytest.approx(summary.metrics["val/loss"])
    again = warm.command(own_folder, "reproduce", str(found[3]), *QUIET)
    told, _ = again.communicate()
    assert again.returncode == 0 and "\nreproduced " in told


def test_what_can_not_be_trained_together_is_trained_one_by_one(own_folder, sweep):
    """The message names the jobs, as the same sweep may have others."""
    said = sweep(own_folder, "model=gru", "data=mnist1d", SEEDS, "train.num_steps=2", "device=cpu", *QUIET)
    reason = "torch can't take aten::gru.input for several models at once"
    assert f"batch    4 jobs are trained one by one: {reason} (seed=0, ...)" in said
    assert [job.state for job in ledger.read(own_folder / "swept").jobs.values()] == ["finished"] * 4
    report = json.loads((own_folder / "swept" / "report.json").read_text())
    assert [job["state"] for job in report["jobs"]] == ["finished"] * 4


def test_jobs_that_are_compiled_are_trained_together(own_folder, sweep):
    # batches of one size
    words = (*SMALL, SEEDS, "train.compile=true", "train.batch_size=100", "data.limit=250", *QUIET)
    said = sweep(own_folder, *words)
    assert "batch    4 jobs differ only in numbers: trained together, in one group" in said
    assert [job.state for job in ledger.read(own_folder / "swept").jobs.values()] == ["finished"] * 4
    log = (own_folder / "swept/3/console.log").read_text()
    assert re.search(r"batch   .*; compile: forward and backward are one function; made in [\d.]+ s", log)
    sweep(own_folder, *words, "train.compile=false", name="written")
    assert_near(own_folder / "swept/3", own_folder / "written/3")


def test_folds_are_trained_together_though_they_differ_by_a_row(own_folder, sweep):
    """27 rows in 4 folds: three of 7 rows, one of 6."""
    words = (*SMALL, "data=iris", "data.limit=30", "data.fold=0/4,1/4,2/4,3/4", "task.plots=false")
    said = sweep(own_folder, *words, name="together")
    assert "batch    4 jobs differ only in numbers: trained together, in one group" in said
    assert "are trained one by one" not in said
    sweep(own_folder, *words, "sweep.batch=off", *QUIET, name="alone")
    jobs = ledger.read(own_folder / "together").jobs.values()
    assert [job.state for job in jobs] == ["finished"] * 4
    found = [own_folder / "together" / job.folder_name for job in jobs]
    logs = [(folder / "console.log").read_text() for folder in found]
    assert sorted(re.search(r": (\d+) train", log)[1] for log in logs) == ["20"] * 3 + ["21"]
    assert [sum(f"of {num} jobs compute together" in log for log in logs) for num in (3, 1)] == [3, 1]
    for folder in found:
        assert_near(folder, own_folder / "alone" / folder.name)
    runs = MlflowClient(f"sqlite:///{own_folder}/mlflow.db").search_runs(["1"])
    assert len(runs) == 5 and {run.info.status for run in runs} == {"FINISHED"}  # including the sweep's run


ROWS = """
import torch

def rows(number):
    if number == 2:
        raise ValueError("no rows for two")
    inputs = torch.randn(120, 4, generator=torch.Generator().manual_seed(number))
    return inputs, (inputs[:, 0] > 0).long()
"""


def test_one_whose_data_can_not_be_had_fails_alone(own_folder, warm):
    (own_folder / "my_rows.py").write_text(ROWS)
    (own_folder / "conf/data").mkdir(parents=True)
    (own_folder / "conf/data/mine.yaml").write_text("_target_: my_rows.rows\nnumber: ${seed}\n")
    words = ("data=mine", "model=linear", "seed=range(5)", "device=cpu", "train.num_steps=2", *QUIET)
    process = warm.command(own_folder, "-m", *words, "hydra.sweep.dir=swept")
    said, _ = process.communicate()
    assert process.returncode == 1, said
    jobs = ledger.read(own_folder / "swept").jobs.values()
    assert [job.state for job in jobs] == ["finished", "finished", "failed", "finished", "finished"]
    assert "no rows for two" in Summary.read(own_folder / "swept/2").error
    assert "of 4 jobs compute together" in (own_folder / "swept/4/console.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", seeded.drawn("kill", ["the job", "the sweep", "a word to the sweep"], 1))
def test_a_kill_loses_nothing(own_folder, sweep, warm, what):
    words = (*SMALL, SEEDS, "scheduler=cosine", "train.ema_decay=0.9", "train.num_epochs=40", "metrics.pull_every=7")
    words += ("train.checkpoint_every_steps=5", *QUIET)
    sweep(own_folder, *words, name="whole")
    process = warm.command(own_folder, "-m", *words, "hydra.sweep.dir=killed")
    wait_for(lambda: (own_folder / "killed/3/checkpoints/last.pt").exists())
    (job,) = [job for warm_one in psutil.Process(process.pid).children() for job in warm_one.children()]
    if what == "the job":
        job.kill()
    elif what == "the sweep":
        os.kill(process.pid, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM)
    process.communicate()
    sweep(own_folder, *words, "sweep.resume=killed", "sweep.retry=true", name="killed")
    jobs = ledger.read(own_folder / "killed").jobs.values()
    assert [job.state for job in jobs] == ["finished"] * 4
    for number, job in enumerate(jobs):
        assert_near(own_folder / "whole" / str(number), own_folder / "killed" / job.folder_name)
