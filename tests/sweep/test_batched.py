"""Sweeps whose jobs are trained together, as a user starts them: each job is a normal run, also after a kill."""

import re
import shutil
from contextlib import suppress

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient
from waiting import wait_for

from runner.experiment.summary import Summary
from runner.sweep.jobs import ledger
from runner.tracking.journal_reader import read_series

pytestmark = pytest.mark.slow
SMALL = ("model=mlp", "model.hidden_sizes=[16]", "model.dropout=0.2", "device=cpu", "task.plots=false")
UNTRACKED = "tracking.enabled=false"


@pytest.fixture
def sweep(warm):
    """Run a sweep in a directory, and return its output."""

    def run(folder, *words, name="swept", code=0):
        process = warm.command(folder, "-m", *words, f"hydra.sweep.dir={name}")
        output, _ = process.communicate()
        assert process.returncode == code, output
        return output

    return run


ROWS = """
import torch

def rows(number):
    if number == 2:
        raise ValueError("no rows for two")
    inputs = torch.randn(120, 4, generator=torch.Generator().manual_seed(number))
    return inputs, (inputs[:, 0] > 0).long()
"""


def test_group_of_jobs_equals_single_runs(own_folder, sweep, warm, empty_store):
    """A job without data fails without its group; `reproduce` is a single run, and compares all points."""
    shutil.copy(empty_store, own_folder / "mlflow.db")
    (own_folder / "my_rows.py").write_text(ROWS)
    (own_folder / "conf/data").mkdir(parents=True)
    (own_folder / "conf/data/mine.yaml").write_text("_target_: my_rows.rows\nnumber: ${seed}\n")
    jobs = "sweep.zip={seed:[0,1,2,3,4],optimizer.lr:[1e-3,1e-3,1e-3,3e-3,3e-3]}"
    words = (*SMALL[:-1], "data=mine", "task.plots=[confusion]", "train.num_epochs=2", jobs)
    output = sweep(own_folder, *words, code=1)
    assert "batch    5 jobs differ only in numbers: trained together, in one group" in output
    found = ledger.read(own_folder / "swept")
    states = [job.state for job in found.jobs.values()]
    assert states == ["finished", "finished", "failed", "finished", "finished"]
    folders = [found.folder_of(job) for job in found.jobs.values()]
    summaries = [Summary.read(folder) for folder in folders]
    assert "no rows for two" in summaries[2].error
    client = MlflowClient(f"sqlite:///{own_folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    by_id = {run.info.run_id: run for run in runs}
    assert len(runs) == 5  # including the sweep's run, without the job that had no data
    trained = [(folder, summary) for folder, summary in zip(folders, summaries, strict=True) if not summary.error]
    best = min(trained, key=lambda each: each[1].best["value"])
    for folder, summary in trained:
        log = (folder / "console.log").read_text()
        assert re.search(r"of 4 jobs compute together", log)
        # the sweep publishes the jobs and reports this itself
        assert "by the sweep\n" in log and "not reached" not in log
        assert (folder / "runner.log").read_text().count("epoch    2/2") == 1
        assert (folder / ".hydra/overrides.yaml").read_text().count("seed=") == 1
        assert (folder / "plots").exists() == (folder is best[0])  # only the best run has plots and a model
        assert by_id[summary.run_id].info.status == "FINISHED"
        assert by_id[summary.run_id].data.metrics["val/loss"] == pytest.approx(summary.metrics["val/loss"])
    again = warm.command(own_folder, "reproduce", str(folders[3]), UNTRACKED, "task.plots=false")
    output, _ = again.communicate()
    assert again.returncode == 0 and "\nreproduced " in output


def test_jobs_that_cannot_be_stacked_run_singly(own_folder, sweep):
    """The message names the jobs, as the same sweep may have others."""
    words = ("model=gru", "model.hidden_size=8", "data=synthetic", "data.shape=[2,8]", "data.num_rows=100")
    words += ("seed=0,1", "sweep.batch=2", "train.num_steps=2", "device=cpu", UNTRACKED, "task.plots=false")
    reason = "torch can't take aten::gru.input for several models at once"
    assert f"batch    2 jobs are trained one by one: {reason} (seed=0, ...)" in sweep(own_folder, *words)
    assert [job.state for job in ledger.read(own_folder / "swept").jobs.values()] == ["finished"] * 2


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


def test_group_killed_twice_loses_nothing(own_folder, sweep, warm):
    words = (*SMALL, "seed=range(4)", "data.limit=300", "train.batch_size=50", "train.num_epochs=20", UNTRACKED)
    words += ("scheduler=cosine", "train.ema_decay=0.9", "metrics.pull_every=7", "train.checkpoint_every_steps=9")
    sweep(own_folder, *words, name="whole")
    log, resumed = own_folder / "killed/3/console.log", ()
    for number, kill in enumerate(("the job", "the sweep"), 1):
        process = warm.command(own_folder, "-m", *words, *resumed, "hydra.sweep.dir=killed")
        wait_for(lambda process=process, number=number: process.poll() is not None or is_at_work(log, number))
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # on a slow machine it may have ended
            if kill == "the job":
                for child in psutil.Process(process.pid).children():
                    for job in child.children():
                        job.kill()
            else:
                process.kill()
        process.communicate()
        resumed = ("sweep.resume=killed", "sweep.retry=true")
    sweep(own_folder, *words, *resumed, name="killed")
    jobs = ledger.read(own_folder / "killed").jobs.values()
    assert [job.state for job in jobs] == ["finished"] * 4
    for number, job in enumerate(jobs):
        assert_near(own_folder / "whole" / str(number), own_folder / "killed" / job.folder_name)


def is_at_work(log, num_starts):
    """Whether the last job of the group has started that often, and has a checkpoint."""
    has_started = log.exists() and log.read_text().count("run      ") >= num_starts
    return has_started and (log.parent / "checkpoints/last.pt").exists()
