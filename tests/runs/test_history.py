"""`python -m runner history` and `runner.history()`: all points of a run, from its folder and from a store."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
from trained_runs import NO_PICTURES

import runner

WORDS = ["model=linear", "device=cpu", "train.num_epochs=40", "data.limit=200", NO_PICTURES, "tracking.points=100"]


def test_of_a_folder(run):
    code, out, _ = run("history", "outputs/digits/run")
    assert code == 0 and "train/loss" in out and "val/accuracy" in out
    found = runner.history("outputs/digits/run")
    assert found.index.name == "step" and found["train/loss"].notna().all()
    code, out, _ = run("history", "outputs/digits/run", "--json")
    told = json.loads(out)["metrics"]["train/loss"]
    losses = found["train/loss"]
    assert told == {
        "points": len(found), "first_step": 1, "last_step": len(found), "first": losses.iloc[0],
        "last": losses.iloc[-1], "least": losses.min(), "greatest": losses.max(),
    }  # fmt: skip


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_as_a_file(run, tmp_path, ending):
    file = tmp_path / f"all.{ending}"
    code, out, _ = run("history", "outputs/digits/run", f"--output={file}")
    rows = pandas.read_parquet(file) if ending == "parquet" else pandas.read_csv(file)
    assert code == 0 and out == f"{len(rows)} points in {file}\n"
    assert list(rows.columns) == ["metric", "step", "time_ms", "value"]
    losses = runner.history("outputs/digits/run")["train/loss"]
    assert rows[rows.metric == "train/loss"].value.tolist() == losses.tolist()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["outputs/digits/run", "--output", "x.txt"], "what ends in .txt is not written"),
        (["outputs/digits/run", "--output"], "it has no value"),
        (["outputs/digits/run", "--rows=3"], "history does not take --rows=3"),
        (["0" * 32, "tracking.uri=sqlite:///nowhere.db"], "there is no store sqlite:"),
    ],
)
def test_mistakes(run, words, problem):
    code, _, err = run("history", *words)
    assert code == 2 and problem in err and not Path("nowhere.db").exists()


@pytest.mark.slow
def test_of_a_store_that_has_a_part(own_folder, run, warm_programs, empty_store):
    shutil.copy(empty_store, "runs.db")
    uri = f"tracking.uri=sqlite:///{own_folder}/runs.db"
    assert run(*WORDS, uri, "hydra.run.dir=outputs/a/run", "train.batch_size=20")[0] == 0
    told = json.loads(Path("outputs/a/run/summary.json").read_text())
    assert told["num_steps"] == 320 and told["tracker"]["points_pending"] == 0 < told["tracker"]["points_left_out"]
    whole = runner.history("last")
    assert whole["train/loss"].notna().sum() == 320
    shutil.rmtree("outputs")
    stored = runner.history(told["run_id"], uri=uri.partition("=")[2])
    assert np.array_equal(stored["train/loss"].dropna(), whole["train/loss"]) and stored["val/loss"].notna().sum() == 40
    assert run("history", told["run_id"], uri, "--output", "all.csv")[0] == 0
    with Path("all.csv").open() as stream:
        assert sum(row["metric"] == "train/loss" for row in csv.DictReader(stream)) == 320
    code, out, err = run("reproduce", told["run_id"], uri, "tracking.enabled=false")
    assert code == 0 and "\nreproduced" in out, err
