"""`python -m runner history` and `runner.history()`: all points of a run, from its directory and from a store."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from trained_runs import NO_PICTURES

import runner
from runner.cli.commands import show_history
from runner.runs import find
from runner.runs.history import folder_of, of_store
from runner.tracking.journal import Journal

WORDS = ["model=linear", "device=cpu", "train.num_epochs=40", "data.limit=200", NO_PICTURES, "tracking.points=100"]


def test_of_a_folder(run):
    code, out, _ = run("history", "outputs/digits/run")
    assert code == 0 and "train/loss" in out and "val/accuracy" in out
    found = runner.history("outputs/digits/run")
    assert found.index.name == "step" and found["train/loss"].notna().all()
    code, out, _ = run("history", "outputs/digits/run", "--json")
    recorded = json.loads(out)["metrics"]["train/loss"]
    losses = found["train/loss"]
    assert recorded == {
        "points": len(found), "first_step": 1, "last_step": len(found), "first": losses.iloc[0],
        "last": losses.iloc[-1], "least": losses.min(), "greatest": losses.max(),
    }  # fmt: skip


def test_history_shows_whole_names(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    values = dict.fromkeys(("first", "last", "least", "greatest"), 118378.4)
    show_history({"speed/samples_per_second": {"points": 1, "first_step": 1_200, "last_step": 1_200, **values}})
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["speed/samples_per_second", "1", "1,200", *["118,378.4"] * 4] and len(line) <= 80


def test_as_a_file(run, tmp_path):
    losses = runner.history("outputs/digits/run")["train/loss"]
    for ending, read in (("csv", pandas.read_csv), ("parquet", pandas.read_parquet)):
        code, out, _ = run("history", "outputs/digits/run", f"--output={tmp_path}/all.{ending}")
        rows = read(tmp_path / f"all.{ending}")
        assert code == 0 and out == f"{len(rows)} points in {tmp_path}/all.{ending}\n"
        assert list(rows.columns) == ["metric", "step", "time_ms", "value"]
        assert rows[rows.metric == "train/loss"].value.tolist() == losses.tolist()


def test_history_of_directory_ignores_store(run):
    code, out, _ = run("history", "outputs/digits/run", "tracking.uri=http://me:secret@nowhere")
    assert code == 0 and out.startswith("note: tracking.uri=http://me:***@nowhere has no effect: all runs have their")
    code, out, _ = run("history", "outputs/digits/run", "tracking.uri=http://nowhere", "--json")
    assert code == 0 and "train/loss" in json.loads(out)["metrics"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "there is no directory `nowhere`"),
        (["outputs/digits/run", "--output", "x.txt"], "the format `.txt` can't be written"),
        (["outputs/digits/run", "--output"], "`--output` needs a value"),
        (["outputs/digits/run", "--output", "/proc/x.csv"], "can't write in `/proc`: "),
        (["outputs/digits/run", "--rows=3"], "`history` does not take `--rows`"),
        (["0" * 32, "tracking.uri=sqlite:///nowhere.db"], "and the store sqlite:"),
        (
            ["0" * 32, "tracking.uri=sqlite:///other.db"],
            "use `tracking.uri=URI` of the store that has it; this was sqlite:",
        ),
    ],
)
def test_history_errors_have_help(run, words, problem, empty_store):
    Path("other.db").write_bytes(empty_store.read_bytes())
    code, _, err = run("history", *words)
    assert code == 2 and problem in err and not Path("nowhere.db").exists()


def test_id_of_two_directories_is_read_from_the_store(monkeypatch, tmp_path):
    monkeypatch.setattr(find, "with_id", lambda expected: [tmp_path / "a", tmp_path / "b"])
    assert folder_of("0" * 32) is None


@pytest.mark.parametrize(("ending", "has_journal"), [("csv", True), ("parquet", False), ("feather", True)])
def test_history_of_run_without_points(run, tmp_path, ending, has_journal):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rerun.yaml").write_text("seed: 0\n")
    if has_journal:
        with Journal(folder) as journal:
            journal.event("start", start_ms=0, params={}, tags={})
    file = tmp_path / f"all.{ending}"
    code, out, err = run("history", str(folder), f"--output={file}")
    assert (code, out) == (0, f"0 points in {file}\n"), err
    read = {"csv": pandas.read_csv, "parquet": pandas.read_parquet, "feather": pandas.read_feather}[ending]
    assert list(read(file).columns) == ["metric", "step", "time_ms", "value"]


@pytest.mark.parametrize(("status", "last"), [("RUNNING", 10), ("KILLED", 10), ("FINISHED", 3)])
def test_history_includes_later_points(tmp_path, status, last):
    """The file is from an earlier stop; a step that was taken again was sent again."""
    table = {"metric": ["a"] * 3, "step": [1, 2, 3], "time_ms": [10, 20, 30], "value": [1.0, 2.0, 3.0]}
    pandas.DataFrame(table).to_parquet(tmp_path / "history.parquet")
    points = [SimpleNamespace(step=step, timestamp=10 * step, value=float(step)) for step in range(1, 11)]
    client = SimpleNamespace(
        list_artifacts=lambda run_id: [SimpleNamespace(path="history.parquet")],
        download_artifacts=lambda run_id, path, folder: str(tmp_path / path),
        get_metric_history=lambda run_id, name: list(points),
    )
    run = SimpleNamespace(info=SimpleNamespace(run_id="x", status=status), data=SimpleNamespace(metrics={"a": 10.0}))
    (steps, times_ms, values) = of_store(client, run)["a"]
    assert steps.tolist() == list(range(1, last + 1)) == values.tolist() and times_ms.tolist() == [
        10 * s for s in steps
    ]


@pytest.mark.slow
def test_history_of_thinned_store_keeps_points(own_folder, run, warm_programs, empty_store):
    shutil.copy(empty_store, "runs.db")
    uri = f"tracking.uri=sqlite:///{own_folder}/runs.db"
    assert run(*WORDS, uri, "hydra.run.dir=outputs/a/run", "train.batch_size=20")[0] == 0
    recorded = json.loads(Path("outputs/a/run/summary.json").read_text())
    assert (
        recorded["num_steps"] == 320
        and recorded["tracker"]["points_pending"] == 0 < recorded["tracker"]["points_left_out"]
    )
    whole = runner.history("last")
    assert whole["train/loss"].notna().sum() == 320
    shutil.rmtree("outputs")
    stored = runner.history(recorded["run_id"], uri=uri.partition("=")[2])
    assert np.array_equal(stored["train/loss"].dropna(), whole["train/loss"]) and stored["val/loss"].notna().sum() == 40
    for _ in range(2):  # the second call replaces the file
        assert run("history", recorded["run_id"], uri, "--output", "all.csv")[0] == 0
    with Path("all.csv").open() as stream:
        assert sum(row["metric"] == "train/loss" for row in csv.DictReader(stream)) == 320
    code, out, err = run("reproduce", recorded["run_id"], uri, "tracking.enabled=false")
    assert code == 0 and "\nreproduced" in out, err
