"""Sweeps on launchers of others: Hydra's basic one, which runs the jobs one after the other in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from sweeps_in_a_shell import finish, interrupt, jobs_in, person, read_until, states, summary
from waiting import wait_for

from runner.config import untrusted
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import Prepared
from runner.sweep.jobs.run_job import Assignment
from runner.sweep.launchers.hydra_launcher import launch, overrides_of, payload_of

pytestmark = pytest.mark.slow
BASIC = "hydra/launcher=basic"
FOLDER = "hydra.sweep.dir=swept"


def test_a_job_that_takes_the_launcher_with_it_is_a_row_and_the_others_run(warm, tmp_path):
    words = ("device=cpu", "model=dying", "model.how=fine,SIGSEGV,exit,again", "train.num_epochs=1")
    code, text = finish(warm.command(person(tmp_path), "-m", FOLDER, BASIC, *words))
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


def test_a_stop_ends_the_job_that_runs_and_those_behind_it_wait(warm, tmp_path):
    words = ("device=cpu", "model=linear", "train.num_epochs=1000000", "train.checkpoint_every_steps=50", "seed=1,2")
    process = warm.command(tmp_path, "-m", FOLDER, BASIC, *words, "tracking.enabled=false", "train.max_seconds=60")
    read_until(process, " began on", 2)
    wait_for(lambda: (tmp_path / "swept/0/checkpoints/last.pt").exists())
    interrupt(process)
    code, text = finish(process)
    assert code == 130, text
    assert [state for state, _, _ in states(tmp_path).values()] == ["interrupted"] * 2
    assert summary(tmp_path, 0)["status"] == "killed"
    assert not (tmp_path / "swept/1/summary.json").exists()
    wait_for(lambda: not jobs_in(tmp_path))


@pytest.mark.parametrize("uri", ["${oc.env:MLFLOW_TRACKING_URI,sqlite:///mlflow.db}", r"http://it's\here\'s/a,b=c\\"])
def test_a_launcher_that_composes_again_is_told_the_store(uri):
    config = OmegaConf.create({"tracking": {"uri": uri}})
    assigned = Assignment("sweep", "1", "digits", "seed=1")
    words = overrides_of(Prepared(Job(0, ("seed=1",), "seed=1"), config), assigned, Path("swept"))
    (word,) = [word for word in words if word.startswith("tracking.uri=")]
    assert OverridesParser.create().parse_override(word).value() == uri
    named = Prepared(Job(0, ("tracking.uri=http://mine",), ""), config)
    assert [word for word in overrides_of(named, assigned, Path("swept")) if "tracking" in word] == [
        "tracking.uri=http://mine"
    ]


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_what_a_person_trusts_the_process_of_a_batch_trusts(monkeypatch, is_looked_at):
    seen = []

    class Launcher:
        def launch(self, words, initial_job_idx):
            seen.append((words, initial_job_idx, untrusted.is_trusted()))

    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda self, **more: Launcher())
    config = OmegaConf.create({"hydra": {"job": {"name": "runner"}}})
    with untrusted.trusting(is_looked_at):
        payload = payload_of(config, None, [["seed=1"]], 3)
    assert launch(payload) == 0
    assert seen == [([["seed=1"]], 3, is_looked_at)]
