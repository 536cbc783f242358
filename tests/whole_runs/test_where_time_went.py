"""`time` of summary.json, however a run ends: its seconds add up to the wall time, and the line, the plot and `explain` show it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from runner import cli, run

WORDS = ("model=mlp", "model.hidden_sizes=[8]", "task.plots=false", "tracking.enabled=false")
OF_STEPS = {"data", "compute", "metrics"}


def summary(folder="run"):
    return json.loads((Path(folder) / "summary.json").read_text())


def check(found, *names):
    assert sum(found["time"].values()) == pytest.approx(found["seconds"]["total"], rel=0.03)
    assert set(names) <= found["time"].keys() and min(found["time"].values()) > 0


def test_a_run_and_its_tree(ink, own_folder, capfd, monkeypatch):
    monkeypatch.setattr("runner.experiment.session.IMPORTED", time.perf_counter())  # not this process's age
    assert cli.main([*WORDS, "hydra.run.dir=run", "train.num_epochs=3"]) == 0
    out = capfd.readouterr().out
    found = summary()
    check(found, "start-up", *OF_STEPS, "validation", "test", "checkpoints", "finish")
    assert next(iter(found["time"])) == "start-up" and "\ntime    " in out and "training " in out
    assert found["step"]["clocked"] > 10 and {"data", "forward", "backward", "update", "metrics"} == set(
        found["step"]["parts"]
    )

    assert cli.main(["explain", "run", "--time"]) == 0
    tree = " ".join(capfd.readouterr().out.split())  # the line breaks at 80 columns depend on the numbers
    assert "start-up" in tree and "├── " in tree and f"{found['step']['clocked']} that were clocked" in tree
    assert cli.main(["explain", "run", "--time", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["time"] == found["time"]
    assert cli.main(["explain", "run", "--trace", "--json"]) == 0
    traced = json.loads(capfd.readouterr().out)
    assert Path(traced["trace"]).is_file() and "addmm" in Path(traced["operations"]).read_text()
    assert summary() == found and not list(own_folder.glob(".runner-*"))


def test_what_explain_does_not_take(own_folder, capfd):
    assert cli.main(["explain", "run", "--tim"]) == 2
    assert "--time" in capfd.readouterr().err
    assert cli.main(["explain", "run", "--time", "device=cpu"]) == 2
    assert "  --> device=cpu\n" in capfd.readouterr().err
    assert cli.main(["explain", "run", "--trace", "device=cpu", "train.cuda_graph=false", "optimizer.lr=1"]) == 2
    said = capfd.readouterr().err
    assert (
        "error: `explain` takes the run as it was" in said and "--> optimizer.lr=1\n" in said and said.count("-->") == 1
    )
    for first, other in (("--time", "--step=3"), ("--trace", "--step=3"), ("--trace", "--time")):
        assert cli.main(["explain", "run", first, other]) == 2
        assert "  --> explain --t" in capfd.readouterr().err
    Path("run").mkdir()
    (Path("run") / "rerun.yaml").write_text("{}")
    assert cli.main(["explain", "run", "--time"]) == 2


def test_resumed_and_empty_runs_have_separate_times(own_folder):
    assert cli.main([*WORDS, "hydra.run.dir=run", "train.num_epochs=1"]) == 0
    assert cli.main(["resume", "run", "train.num_epochs=3"]) == 0
    found = summary()
    check(found, *OF_STEPS)
    assert found["num_steps"] == 36 and found["step"]["seconds"] * 24 < found["seconds"]["total"]
    assert cli.main([*WORDS, "hydra.run.dir=without", "train.num_epochs=1", "train.clocked_steps=null"]) == 0
    found = summary("without")
    check(found, "start-up", "steps", "validation")
    assert found["step"] is None


def test_time_of_run_resumed_at_its_end(own_folder):
    run([*WORDS, "train.num_steps=5"], folder="run")
    (Path("run") / "summary.json").unlink()
    assert cli.main(["resume", "run"]) == 0
    found = summary()
    assert found["num_steps"] == 5 and found["step"] is None
    check(found, "start-up")


def test_jobs_that_are_trained_together(own_folder, warm_jobs):
    assert cli.main(["-m", *WORDS, "train.num_epochs=2", "seed=1,2,3,4", "sweep.batch=4", "hydra.sweep.dir=sweep"]) == 0
    for number in range(4):
        found = summary(f"sweep/{number}")
        check(found, "data", "compute", "metrics")
        assert set(found["step"]["parts"]) == {"data", "step", "metrics"}
