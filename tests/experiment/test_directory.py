"""A directory has one run: another experiment, a start that is too early, or a foreign directory is refused without writing anything."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from waiting import LONGEST

from runner import cli, run
from runner.errors import RunnerError
from runner.experiment import directory as directories
from runner.tracking.ack import read_ack
from runner.tracking.journal import read_points

SHORT = ["device=cpu", "model=linear", "train.num_steps=6", "tracking.enabled=false", "hydra.run.dir=run"]
#: overrides that change the experiment, and the text of the error
OTHERS = {
    "data=iris": "data.name=digits (now: iris)",
    "+optimizer.weight_decay=0.1": "optimizer.weight_decay=- (now: 0.1)",
    "train.ema_decay=0.9": "train.ema_decay=None (now: 0.9)",
}


def content(folder="run"):
    """Return the bytes of every file of a directory, and its modification time."""
    files = [
        path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != Path(directories.LOCK).name
    ]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert cli.main(SHORT) == 0
    finally:
        os.chdir(before)
    return folder / "run"


@pytest.fixture
def used(trained, own_folder):
    shutil.copytree(trained, "run")
    return own_folder / "run"


@pytest.mark.parametrize("word", OTHERS)
def test_folder_of_other_experiment_is_kept(word, used, capsys):
    before = content()
    assert cli.main([*SHORT, word]) == 2
    said = capsys.readouterr().err
    assert OTHERS[word] in said and "python -m runner resume run" in said
    assert content() == before


def test_resumable_folder_gets_resume_command(used, capsys):
    before = content()
    assert cli.main(SHORT) == 0
    assert "the run has finished; run `python -m runner resume run train.num_steps=" in capsys.readouterr().out
    assert content() == before
    assert cli.main([*SHORT, "train.num_steps=12"]) == 2
    assert "help: run `python -m runner resume run train.num_steps=12`, or use another" in capsys.readouterr().err
    summary = json.loads((used / "summary.json").read_text())
    (used / "summary.json").write_text(json.dumps(summary | {"status": "killed"}))
    assert cli.main([*SHORT[:-1], "hydra.run.dir=nowhere/../run"]) == 2
    assert "this run is in it already, and can be resumed" in capsys.readouterr().err


def test_finished_runs_command_is_checked_first(used, capsys):
    assert cli.main(["resume", "run", "device=cud", "metrics.pull_every=0"]) == 2
    said = capsys.readouterr()
    assert "--> device=cud\n" in said.err and "--> metrics.pull_every=0\n" in said.err
    assert "finished" not in said.out
    rerun = used / "rerun.yaml"
    rerun.write_text(rerun.read_text().replace("device: cpu", "device: cuda:97"))
    assert cli.main(["resume", "run", "metrics.pull_every=7"]) == 0
    assert "has finished" in capsys.readouterr().out
    assert cli.main(["resume", "run", "metrics.pull_every=0"]) == 2
    said = capsys.readouterr()
    assert "cuda:97" not in said.err and "finished" not in said.out


def test_folder_with_blank_is_quoted_in_suggestions(trained, own_folder, capsys):
    shutil.copytree(trained, "my run")
    assert cli.main(["resume", "my run", "train.num_epochs=2"]) == 2
    assert "`python -m runner resume 'my run' train" in capsys.readouterr().err


def test_restarted_processes_resume(used, monkeypatch):
    summary = json.loads((used / "summary.json").read_text())
    (used / "summary.json").write_text(json.dumps(summary | {"status": "killed"}))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert cli.main([*SHORT, "train.num_steps=12"]) == 0
    assert json.loads((used / "summary.json").read_text())["num_steps"] == 12
    assert cli.main([*SHORT, "train.num_steps=12", "seed=1"]) == 2


def test_second_process_is_refused_like_first(used, monkeypatch):
    """Otherwise it would wait for a process that has ended."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    before = content()
    assert cli.main([*SHORT, "seed=3"]) == 2
    assert cli.main(SHORT) == 0  # it has finished, so torchrun must not report a failure
    assert content() == before


def test_repeated_run_needs_another_directory(used):
    before = content()
    with pytest.raises(RunnerError, match="has finished"):
        run(["-cd", "run"], config_name="rerun", folder=Path("run"))
    assert content() == before


def test_locked_folder_is_refused_before_writing(own_folder, capsys):
    Path("run/journal").mkdir(parents=True)
    with FileLock(Path("run") / directories.LOCK):
        assert cli.main(SHORT) == 2
        assert "another run is writing there" in capsys.readouterr().err
        assert not content() and not Path("run/.hydra").exists()
    assert cli.main(SHORT) == 0


def test_error_keeps_users_files(own_folder, capsys):
    mine = [Path(name) for name in ("journal/notes.txt", ".hydra/mine.yaml", "data.csv")]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    words = ["device=cpu", "model=linear", "data=table", "data.path=no.csv", "tracking.enabled=false"]
    assert cli.main([*words, "hydra.run.dir=."]) == 2
    assert "no.csv" in capsys.readouterr().err
    assert {path for path in Path().rglob("*") if path.is_file()} == set(mine)
    for file in mine:
        file.unlink()
    for place in ("journal", ".hydra"):
        Path(place).rmdir()
    assert cli.main([*words, "hydra.run.dir=."]) == 2
    assert own_folder.is_dir() and not list(own_folder.iterdir())


def test_existing_files_with_run_names_are_kept(tmp_path):
    folder = tmp_path / "own"
    mine = [folder / name for name in (directories.LOG, ".hydra/mine.yaml", "journal/publish.log")]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine: 1")
    with directories.RunDirectory(folder) as directory:
        for name in directories.HYDRAS:
            (folder / name).write_text("Hydra's")
        (folder / "journal/journal.lock").touch()
        directory.leave_nothing()
    assert {path for path in folder.rglob("*") if path.is_file()} == set(mine)
    assert {file.read_text() for file in mine} == {"mine: 1"}


def test_unexpected_error_before_run_stops_it(used, monkeypatch, capsys):
    """Hydra turns the exception into a warning, writes to the directory and starts the run."""
    monkeypatch.setattr("tempfile.tempdir", str(used.parent))
    monkeypatch.setattr(directories, "begin", lambda *_, **__: 1 / 0)
    before = content()
    assert cli.main([*SHORT, "seed=3"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert content() == before


def test_checkpoint_of_other_experiment_is_refused(used, capsys):
    rerun = used / "rerun.yaml"
    rerun.write_text(rerun.read_text().replace("lr: 0.001", "lr: 0.5"))
    weights = torch.load(used / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert cli.main(["resume", "run", "train.num_steps=12"]) != 0
    said = "".join(capsys.readouterr())
    assert "optimizer.lr=0.5" in said and "optimizer.lr=0.001" in said
    after = torch.load(used / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_last_ignores_folders_of_ranks(used):
    from runner.runs import find

    run = Path("outputs/day/time")
    shutil.copytree(used, run)
    (run / "ranks").mkdir()
    shutil.copy(run / "rerun.yaml", run / "ranks" / "rerun.yaml")
    later = time.time() + 10
    os.utime(run / "ranks" / "rerun.yaml", (later, later))
    assert find.find("last") == run


@pytest.mark.slow
def test_two_runs_at_once_and_deleted_folder(own_folder, warm, empty_store):
    from mlflow import MlflowClient

    words = ["device=cpu", "model=mlp", "train.num_epochs=1000000", "metrics.pull_every=20", "hydra.run.dir=run"]
    words.append("model.hidden_sizes=[1024,1024]")  # slow, to limit the number of points to publish
    words += [
        "task.plots=false",
        "tracking.log_model=false",
        "tracking.points=all",  # adds the file of all points
        f"tracking.uri=sqlite:///{own_folder}/runs.db",
        "tracking.system_metrics=false",
        "tracking.grace_seconds=60",
    ]
    shutil.copy(empty_store, "runs.db")
    first = warm.command(own_folder, *words, MLFLOW_DISABLE_TELEMETRY="true")
    try:
        deadline = time.monotonic() + LONGEST
        while not (Path("run/checkpoints/best.pt").exists() and read_points(Path("run"))):
            assert first.poll() is None and time.monotonic() < deadline, first.stdout.read()
            time.sleep(0.05)
        papers = {
            name: Path("run", name).read_bytes() for name in ("rerun.yaml", "model.json", ".hydra/overrides.yaml")
        }
        assert cli.main([*words, "seed=7"]) == 2
        assert cli.main(words) == 2
        assert {name: Path("run", name).read_bytes() for name in papers} == papers
        acknowledged = read_ack(Path("run"))
        assert not acknowledged.died and not acknowledged.ended
        before = read_points(Path("run"))["train/loss"]
        shutil.rmtree("run", ignore_errors=True)
        said = first.communicate(timeout=LONGEST)[0]
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 1, said
    kept = read_points(Path("run"))["train/loss"]
    assert kept[: len(before)] == before and [step for step, _ in kept] == list(range(1, len(kept) + 1))
    summary = json.loads(Path("run/summary.json").read_text())
    client = MlflowClient(f"sqlite:///{own_folder}/runs.db")
    assert client.get_run(summary["run_id"]).info.status == "FAILED"
    tracked = client.get_metric_history(summary["run_id"], "train/loss")
    assert sorted(point.step for point in tracked) == [step for step, _ in kept]
    assert "the run's directory was deleted or renamed while it trained" in said and "Traceback" not in said, said


def test_run_begun_in_between_is_refused(own_folder, monkeypatch):
    folder, refuse_used = own_folder / "run", directories.refuse_used

    def another_begins(*settings, **more):
        refuse_used(*settings, **more)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints/last.pt").touch()

    monkeypatch.setattr(directories, "refuse_used", another_begins)
    with pytest.raises(RunnerError, match="another experiment"):
        directories.begin(folder, OmegaConf.create({"seed": 1})).__enter__()
    with FileLock(folder / directories.LOCK, timeout=0):
        pass


def test_run_directory_is_held_until_last_release(own_folder):
    folder = own_folder / "run"
    with directories.RunDirectory(folder), directories.RunDirectory(folder):
        pass
    with directories.RunDirectory(folder):
        with directories.RunDirectory(own_folder / "other/../run"):
            pass
        with pytest.raises(Timeout):
            FileLock(folder / directories.LOCK).acquire(timeout=0)
    FileLock(folder / directories.LOCK).acquire(timeout=0)
