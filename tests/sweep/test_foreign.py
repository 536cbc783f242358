"""Sweeps on launchers of others: Hydra's basic one, which runs the jobs one after the other in one process."""

from __future__ import annotations

import pytest
from sweeps_in_a_shell import finish, interrupt, jobs_in, person, read_until, start, states, summary, sweep, wait_for

pytestmark = pytest.mark.slow
BASIC = "hydra/launcher=basic"


def test_a_job_that_takes_the_launcher_with_it_is_a_row_and_the_others_run(tmp_path):
    words = ("device=cpu", "model=dying", "model.how=fine,SIGSEGV,exit,again", "train.num_epochs=1")
    code, text = sweep(person(tmp_path), BASIC, *words)
    found = {name.partition("=")[2]: (state, error) for name, (state, _, error) in states(tmp_path).items()}
    assert code == 1, text
    assert found == {
        "fine": ("finished", None),
        "SIGSEGV": ("failed", "BasicLauncher's process died of SIGSEGV; launcher.log says more"),
        "exit": ("failed", "BasicLauncher's process ended with exit code 7; launcher.log says more"),
        "again": ("finished", None),
    }
    assert summary(tmp_path, 3)["run_id"], "it is not in MLflow"
    assert (tmp_path / "swept/1/console.log").samefile(tmp_path / "swept/launcher.log")


def test_a_stop_ends_the_job_that_runs_and_those_behind_it_wait(tmp_path):
    words = ("device=cpu", "model=linear", "train.num_epochs=1000000", "train.checkpoint_every_steps=50", "seed=1,2")
    process = start(tmp_path, BASIC, *words, "tracking.enabled=false", "train.max_seconds=60")
    read_until(process, " began on", 2)
    wait_for(lambda: (tmp_path / "swept/0/checkpoints/last.pt").exists())
    interrupt(process)
    code, text = finish(process)
    assert code == 130, text
    assert [state for state, _, _ in states(tmp_path).values()] == ["interrupted"] * 2
    assert summary(tmp_path, 0)["status"] == "killed"
    assert not (tmp_path / "swept/1/summary.json").exists()
    wait_for(lambda: not jobs_in(tmp_path))
