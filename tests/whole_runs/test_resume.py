"""`python -m runner resume`: continues a stopped run, and refuses everything else."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from runner import cli
from runner.config import origin
from runner.runs import find
from runner.tracking.journal import read_points
from runner.tracking.journal_reader import read_events
from runner.tracking.journal_records import FILE as JOURNAL

WORDS = [
    "model=mlp",
    "model.dropout=0.2",
    "train.num_epochs=4",
    "train.ema_decay=0.9",
    "scheduler=cosine",
    "device=cpu",
    "task.plots=false",
]
QUIET = "tracking.enabled=false"


def final(folder):
    state = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    points = {name: series for name, series in read_points(folder).items() if not name.startswith("speed/")}
    return state, points


def assert_same(one, other):
    (state, points), (expected, expected_points) = final(one), final(other)
    for key in ("model", "average"):
        assert all(torch.equal(state[key][name], expected[key][name]) for name in expected[key]), key
    # a run that was extended was also tested at its first end
    last = {name: series[-1:] if name.startswith("test/") else series for name, series in points.items()}
    assert last == expected_points


def test_resume_last_extends_newest_run(own_folder, capfd):
    assert cli.main([*WORDS, QUIET, "train.num_epochs=1", "scheduler=constant", "hydra.run.dir=outputs/a/run"]) == 0
    assert cli.main(["resume", "last"]) == 0
    assert "has finished" in capfd.readouterr().out
    assert cli.main(["resume", "last", "train.num_epochs=3", "tracking.tags={team: vision}"]) == 0
    starts = [event["tags"].get("team") for event in read_events(Path("outputs/a/run")) if event["kind"] == "start"]
    assert starts == [None, "vision"]
    summary = json.loads(Path("outputs/a/run/summary.json").read_text())
    assert (summary["status"], summary["num_steps"]) == ("finished", 36)
    assert cli.main([*WORDS, QUIET, "train.num_epochs=3", "scheduler=constant", "hydra.run.dir=outputs/b/run"]) == 0
    assert_same(Path("outputs/a/run"), Path("outputs/b/run"))


def test_resume_ignores_removed_keys(own_folder, capfd):
    words = ["data=iris", "model=mlp", "device=cpu", "train.num_epochs=1", "task.plots=false", QUIET]
    assert cli.main([*words, "hydra.run.dir=run"]) == 0
    file, rerun = Path("run/rerun.yaml"), ["-cd", "run", "-cn", "rerun"]
    commands = [
        ["evaluate", "run"],
        ["reproduce", "run", QUIET],
        [*rerun, QUIET],
        ["resume", "run", "train.num_epochs=2"],
    ]
    text = file.read_text()
    for command in commands:
        file.write_text(text.replace("placement:\n", "placement:\n  map: null\n"))
        origin.sign(file.parent, "")
        assert cli.main(command) == 0, command
    assert file.read_text() == text.replace("num_epochs: 1\n", "num_epochs: 2\n")
    file.write_text(text.replace("placement:\n", "placement:\n  map: {output: cpu}\n"))
    for command in commands:
        capfd.readouterr()
        assert cli.main(command) == 2 and "there is no key `placement.map`" in capfd.readouterr().err, command


@pytest.mark.parametrize("name", ["outputs/flat", "outputs/2026-01-01/12-00-00", "multirun/a/b/3"])
def test_last_is_a_run_at_any_depth(own_folder, name):
    for number, place in enumerate(("outputs/old/run", name, f"{name}/ranks/1")):
        Path(place).mkdir(parents=True)
        Path(place, "rerun.yaml").write_text("seed: 0\n")
        os.utime(Path(place, "rerun.yaml"), (number, number))
        if "ranks" not in place:
            Path(place, JOURNAL).parent.mkdir(exist_ok=True)
            Path(place, JOURNAL).touch()
    assert find.newest_first() == [Path(name), Path("outputs/old/run")]


@pytest.mark.slow
def test_extended_then_killed_run_is_not_finished(warm, own_folder, capfd):
    folder = Path("outputs/one/run")
    words = [*WORDS, QUIET, "data.limit=600", "train.num_epochs=1", f"hydra.run.dir={folder}"]
    assert cli.main(words) == 0
    before = (folder / "checkpoints" / "last.pt").stat().st_mtime_ns
    longer = ["train.num_epochs=300", "train.checkpoint_every_steps=5"]
    with warm.command(own_folder, "resume", str(folder), *longer) as process:
        while process.poll() is None and (folder / "checkpoints" / "last.pt").stat().st_mtime_ns == before:
            time.sleep(0.005)
        process.kill()
    assert process.wait() != 0 and not (folder / "summary.json").exists()
    capfd.readouterr()
    assert cli.main(["resume", str(folder)]) == 0
    assert "has finished" not in capfd.readouterr().out
    found = json.loads((folder / "summary.json").read_text())
    assert (found["status"], found["num_epochs"]) == ("finished", 300)


def test_resume_by_mlflow_id_continues_same_run(own_folder, warm_programs, empty_store):
    from mlflow import MlflowClient

    shutil.copy(empty_store, "mlflow.db")
    assert cli.main([*WORDS, "train.num_epochs=1", "hydra.run.dir=outputs/a/run", "tracking.log_model=false"]) == 0
    run_id = json.loads(Path("outputs/a/run/summary.json").read_text())["run_id"]
    assert cli.main(["resume", run_id[:12], "train.num_epochs=2"]) == 0
    client = MlflowClient(f"sqlite:///{own_folder}/mlflow.db")
    assert json.loads(Path("outputs/a/run/summary.json").read_text())["run_id"] == run_id
    steps = [point.step for point in client.get_metric_history(run_id, "train/loss")]
    assert sorted(steps) == list(range(1, 25))
    assert client.get_run(run_id).info.status == "FINISHED"


def test_what_would_be_another_experiment_is_refused(own_folder, capfd):
    assert cli.main([*WORDS, QUIET, "train.num_steps=2", "hydra.run.dir=outputs/a/run"]) == 0
    capfd.readouterr()
    for words, said in {
        ("model.hidden_sizes=[3]", "seed=1"): ("help: use `'model.hidden_sizes=[256]'`,", "help: use `seed=0`,"),
        ("optimizer.lr=0.5",): ("the run began with `optimizer.lr=0.001`",),
        ("data.limit=10",): ("another experiment",),
        ("train.batch_size=3",): ("help: use `train.batch_size=128`,",),
        ("modle=mlp",): ("there is no key `modle`",),
    }.items():
        assert cli.main(["resume", "outputs/a/run", *words]) == 2, words
        err = capfd.readouterr().err
        assert "Traceback" not in err
        for text in said:
            assert text in err, words
    assert (
        cli.main(["resume", "outputs/a/run", "train.num_steps=4", "metrics.pull_every=1", "placement.guard=off"]) == 0
    )


def test_run_of_steps_is_extended_by_steps(own_folder, capfd):
    """A number of epochs would be accepted and have no effect."""
    words = [*WORDS, QUIET, "data.limit=600", "train.num_steps=2", "hydra.run.dir=outputs/a/run"]
    assert cli.main(words) == 0
    assert cli.main(["resume", "outputs/a/run"]) == 0
    assert "for more of it: resume outputs/a/run train.num_steps=..." in capfd.readouterr().out
    assert cli.main(words) == 0
    assert "resume outputs/a/run train.num_steps=...` for more of it" in capfd.readouterr().out
    for word in ("train.num_epochs=3", "++train.num_epochs=3"):
        assert cli.main(["resume", "outputs/a/run", word]) == 2
        assert f"resume outputs/a/run {word} train.num_steps=null" in capfd.readouterr().err.replace("`", "")
    for word, steps in {"++train.num_steps=3": 3, "train.num_epochs=2 train.num_steps=null": 8}.items():
        assert cli.main(["resume", "outputs/a/run", *word.split()]) == 0
        assert json.loads(Path("outputs/a/run/summary.json").read_text())["num_steps"] == steps, word


def test_resume_refuses_what_is_not_a_run(own_folder, capfd):
    assert cli.main(["resume", "last"]) == 2
    assert "no run is in outputs or multirun" in capfd.readouterr().err
    Path("mine").mkdir()
    assert cli.main(["resume", "mine"]) == 2
    assert "it has no `rerun.yaml`" in capfd.readouterr().err
    assert cli.main(["resume", "0a1b2c"]) == 2
    assert "no run in outputs or multirun has this id" in capfd.readouterr().err
    Path("mine/ledger.jsonl").touch()
    assert cli.main(["resume", "mine"]) == 2
    assert "sweep.resume=mine" in capfd.readouterr().err


def test_torn_checkpoint_is_reported_and_previous_used(own_folder, capfd):
    words = [*WORDS, QUIET, "train.num_epochs=3", "train.checkpoint_every_steps=9"]
    assert cli.main([*words, "hydra.run.dir=outputs/whole/run"]) == 0
    assert cli.main([*words, "train.max_seconds=0.001", "hydra.run.dir=outputs/torn/run"]) == 0
    shutil.copytree("outputs/whole/run/checkpoints", "outputs/torn/run/checkpoints", dirs_exist_ok=True)
    Path("outputs/torn/run/checkpoints/last.pt").write_bytes(b"torn")
    capfd.readouterr()
    assert cli.main(["resume", "outputs/torn/run", "train.max_seconds=null"]) == 0
    assert "last.pt is damaged; the checkpoint before it is used" in capfd.readouterr().out
    state, expected = final(Path("outputs/torn/run"))[0], final(Path("outputs/whole/run"))[0]
    assert all(torch.equal(state["model"][name], expected["model"][name]) for name in expected["model"])
    for file in Path("outputs/torn/run/checkpoints").glob("last*.pt"):
        file.write_bytes(b"torn")
    assert cli.main(["resume", "outputs/torn/run", "train.num_epochs=5"]) == 2
    assert "checksum" in capfd.readouterr().err


def test_resume_is_logged_without_traceback(own_folder, capfd):
    assert cli.main([*WORDS, QUIET, "train.max_seconds=0.01", "hydra.run.dir=run"]) == 0
    capfd.readouterr()
    (own_folder / "run" / "runner.log").unlink()
    assert cli.main(["resume", "run", "train.max_seconds=null"]) == 0
    assert "device   cpu" in (own_folder / "run" / "runner.log").read_text()
    assert "Traceback" not in capfd.readouterr().err
