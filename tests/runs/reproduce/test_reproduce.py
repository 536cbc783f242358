"""`python -m runner reproduce`: real runs, run again, from their directory and from a store."""

import contextlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runner import cli
from runner.runs.reproduce import recorded
from runner.runs.reproduce import reproduce as repeating
from runner.tracking.journal import Journal, scan
from runner.tracking.journal_reader import read_events
from runner.tracking.journal_records import FILE

QUIET = "tracking.enabled=false"
WORDS = ["model=mlp", "model.hidden_sizes=[16]", "data.limit=400", "device=cpu", "train.num_epochs=3"]
WORDS += ["task.plots=false"]
AGAIN = "hydra.run.dir=outputs/again/run"
FIRST = "hydra.run.dir=outputs/first/run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        assert cli.main([*WORDS, QUIET, FIRST]) == 0
    return folder


@pytest.fixture
def first(own_folder, trained):
    """A finished run in outputs/first/run."""
    shutil.copytree(trained / "outputs", own_folder / "outputs")
    return Path("outputs/first/run")


def result(folder="outputs/again/run"):
    return json.loads((Path(folder) / "reproduce.json").read_text())


def reproduce(capfd, *words):
    capfd.readouterr()
    code = cli.main(["reproduce", *words])
    output = capfd.readouterr()
    assert "Traceback" not in output.out + output.err
    return code, output.out.rstrip().splitlines(), output.err


def test_reproduce_unchanged_is_bitwise_identical(first, capfd):
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    code, lines, _ = reproduce(capfd, "last", AGAIN)
    assert code == 0
    assert lines[-1].startswith("reproduced bitwise (")
    assert lines[0] == "repeat: outputs/first/run (finished, 9 steps)"
    assert lines[1].startswith("made:   with the same code, versions and device")
    assert any(line.startswith("data:   unchanged, by its fingerprint") for line in lines)
    found = result()
    assert found["verdict"] == "bitwise identical" and found["reproduced"] and not found["differences"]
    counts = {name: metric["num_common"] for name, metric in found["metrics"].items()}
    assert counts["train/loss"] == 9 and counts["val/accuracy"] == 3 and counts["test/loss"] == 1
    assert not [name for name in counts if name.startswith(("speed/", "system/"))]
    assert "reproduce.json" in {path.name for path in Path("outputs/again/run").iterdir()}
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    (start,) = [event for event in read_events(Path("outputs/again/run")) if event["kind"] == "start"]
    assert start["tags"]["reproduces"] == "outputs/first/run"


def test_reproduce_shorter_compares_common_steps(first, capfd):
    code, lines, _ = reproduce(capfd, str(first), "train.num_epochs=2", AGAIN)
    assert code == 0 and lines[-1].endswith("up to step 6: it ended at 9 then, and at 6 now)")
    assert result()["differences"] == [{"what": "train.num_epochs", "was": "3", "now": "2"}]
    assert result()["metrics"]["train/loss"]["num_missing"] == 3
    assert result()["metrics"]["test/loss"]["verdict"] == "not compared"


def cut_short(folder, last):
    """Change a run to its state after a kill: nothing in the journal after the step `last`, and no summary."""
    (folder / "summary.json").unlink()
    records = list(scan(folder / FILE))
    (folder / FILE).unlink()
    with Journal(folder) as journal:
        for record in records:
            if isinstance(record.data, dict):
                journal.event(record.kind, **record.data)
                continue
            rows, kept = record.data, record.data.steps <= last
            journal.points(rows.names, rows.steps[kept], rows.times_ms[kept], rows.values[kept])


def test_reproduce_killed_run_compares_common_steps(first, capfd):
    cut_short(first, 5)
    code, lines, _ = reproduce(capfd, str(first), AGAIN)
    assert lines[0] == "repeat: outputs/first/run (killed, 5 of 9 steps)"
    assert code == 0
    assert lines[-1].endswith("up to step 5: it ended at 5 then, and at 9 now)")
    assert result()["metrics"]["train/loss"]["num_additional"] == 4


def test_series_with_clashing_names_stay_apart(tmp_path):
    with Journal(tmp_path) as journal:
        journal.points(("val/p>1", "val/p<1"), [1], [0], [[1.0, 2.0]])
    assert list(repeating._series(tmp_path, spelled=False)) == ["val/p>1", "val/p<1"]
    (first, kept), (second, apart) = repeating._series(tmp_path, spelled=True).items()
    assert (first, kept[1].tolist(), apart[1].tolist()) == ("val/p_1", [1.0], [2.0]) and second.startswith("val/p_1_")


def write_data(shift):
    draw = np.random.default_rng(0)
    np.savez("mine.npz", x=draw.normal(size=(90, 4)) + shift, y=np.arange(90) % 3)


def test_reproduce_other_data_needs_anyway(own_folder, capfd):
    write_data(0)
    words = [
        "data=arrays",
        "data.path=mine.npz",
        "model=linear",
        "device=cpu",
        "train.num_epochs=1",
        "task.plots=false",
        QUIET,
    ]
    assert cli.main([*words, FIRST]) == 0
    write_data(1)
    code, _, err = reproduce(capfd, "last", AGAIN)
    assert code == 2
    assert "the data differs" in err and "--anyway" in err
    assert not Path("outputs/again/run").exists()
    code, lines, _ = reproduce(capfd, "last", "--anyway", AGAIN)
    assert code == 1
    assert any(line.startswith("warning: the data differs: ") for line in lines)
    assert "differs from step 1 on" in lines[-1]


def change_journal(folder, **tags):
    """Change tags in the run's start record."""
    with Journal(folder) as journal:
        (start,) = [event for event in read_events(folder) if event["kind"] == "start"]
        fields = {name: value for name, value in start.items() if name != "kind"}
        journal.event("start", **(fields | {"tags": start["tags"] | tags}))


def test_reproduce_other_versions_warns(first, capfd):
    change_journal(first, device="cuda:0", device_name="NVIDIA H200", runner_version="0.0.1")
    text = (first / "environment.txt").read_text()
    lines = ["torch==1.2.3" if line.lower().startswith("torch==") else line for line in text.splitlines()]
    (first / "environment.txt").write_text("\n".join([*lines, "forgotten_package==7"]) + "\n")
    code, lines, _ = reproduce(capfd, str(first), AGAIN)
    assert code == 0
    assert "warning: the run was made with something else, so its numbers may differ" in lines
    found = {each["what"]: each for each in result()["differences"]}
    assert found.keys() == {"runner", "torch", "packages", "device"}
    assert found["torch"]["was"] == "1.2.3" and found["runner"]["was"] == "0.0.1"
    assert found["packages"]["was"] == "forgotten-package 7"
    assert found["device"]["was"] == "cuda:0 (NVIDIA H200)" and found["device"]["now"].startswith("cpu (")


def git(*words):
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *name, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_reproduce_changed_code_shows_git_commands(own_folder, capfd):
    Path("mine.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", "mine.py")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    Path("mine.py").write_text("a = 2\n")
    assert cli.main([*WORDS, QUIET, FIRST]) == 0
    code, lines, _ = reproduce(capfd, "last", "hydra.run.dir=outputs/same/run")
    assert (code, lines[1]) == (0, "made:   with the same code, versions and device, uncommitted changes too")
    Path("mine.py").write_text("a = 3\n")
    code, lines, _ = reproduce(capfd, "outputs/first/run", AGAIN)
    assert code == 0
    assert result()["differences"] == [
        {"what": "code", "was": f"{commit[:12]} with changes", "now": f"{commit[:12]} with changes, other ones"},
        {"what": "mine.py", "was": "+ a = 2", "now": "+ a = 3"},
    ]
    (words,) = [line.strip() for line in lines if "git apply" in line]
    assert words == f"git stash && git checkout {commit} && git apply outputs/first/run/git.diff"
    subprocess.run(words, shell=True, check=True, capture_output=True)
    assert Path("mine.py").read_text() == "a = 2\n"


def test_reproduce_errors_have_help(first, capfd):
    for words, mend in {
        ("nothing",): "reproduce last",
        ("last", "modle=mlp"): "there is no key `modle`",
        ("last", "tracking.uri=${oc.env:NOT_SET}", "seed=-1"): "`seed` must be 0 or more",
        ("last", "-m", "seed=1"): "one run at a time",
        ("last", "device=cuda:97"): "device=cpu",
        ("0" * 32,): f"reproduce {'0' * 32} tracking.uri=URI",
        ("0" * 32, "tracking.uri=sqlite:///nowhere.db"): "and the store sqlite:",
    }.items():
        code, _, err = reproduce(capfd, *words)
        assert code == 2, words
        assert mend in err, words
    assert not Path("mlflow.db").exists() and not Path("nowhere.db").exists()
    shutil.rmtree(first / "journal")
    code, _, err = reproduce(capfd, str(first))
    assert code == 2 and "has no journal" in err


@pytest.fixture
def on_a_store(own_folder, empty_store, warm_programs):
    """The id of a run that is only in a store; its model is in the user's module `my_models`."""
    (own_folder / "my_models.py").write_text(
        "from pathlib import Path\nfrom runner.models.mlp import MLP\nPath('was_imported').touch()\nclass Net(MLP): pass\n"
    )
    shutil.copy(empty_store, "runs.db")
    uri = f"tracking.uri=sqlite:///{own_folder}/runs.db"

    def run(*words):
        assert cli.main([*WORDS, *words, uri, "tracking.log_model=false", FIRST]) == 0
        run_id = json.loads(Path("outputs/first/run/summary.json").read_text())["run_id"]
        shutil.rmtree("outputs")
        Path("was_imported").unlink(missing_ok=True)
        return run_id, uri

    return run


@pytest.mark.slow
def test_reproduce_from_store(on_a_store, capfd):
    from mlflow import MlflowClient

    run_id, uri = on_a_store()
    client = MlflowClient(uri.partition("=")[2])
    code, lines, _ = reproduce(capfd, run_id, uri, AGAIN)
    assert code == 0, lines
    assert lines[0].startswith(f"repeat: {run_id} on sqlite:///") and lines[0].endswith("(finished, 9 steps)")
    assert lines[-1].startswith("reproduced bitwise (")
    assert result()["metrics"]["train/loss"]["num_common"] == 9
    again = client.get_run(json.loads(Path("outputs/again/run/summary.json").read_text())["run_id"])
    assert again.data.tags["reproduces"] == run_id
    client.log_metric(run_id, "train/loss", 0.5, step=4, timestamp=2**41)  # a later point of that step
    code, lines, _ = reproduce(capfd, run_id, uri, QUIET, "hydra.run.dir=outputs/more/run")
    assert code == 1
    assert lines[-1].startswith("NOT reproduced: train/loss differs from step 4 on (0.5 then, ")


@pytest.mark.slow
def test_reproduce_from_store_needs_trust(on_a_store, capfd):
    run_id, uri = on_a_store("model._target_=my_models.Net")
    code, _, err = reproduce(capfd, run_id, uri, AGAIN)
    assert code == 2
    assert "model._target_=my_models.Net" in err and "use `--trust` when you have looked at the file" in err
    assert f"mlflow artifacts download -r {run_id} -a rerun.yaml" in err
    assert not Path("was_imported").exists() and not Path("outputs").exists()
    code, lines, _ = reproduce(capfd, run_id, uri, "--trust", AGAIN)
    assert code == 0 and lines[-1].startswith("reproduced bitwise")


@pytest.mark.slow
def test_reproduce_of_tampered_configuration_runs_nothing(on_a_store, capfd):
    from mlflow import MlflowClient

    run_id, uri = on_a_store()
    client = MlflowClient(uri.partition("=")[2])
    sound = Path(client.download_artifacts(run_id, "rerun.yaml", ".")).read_text()
    for old, new in {
        "_target_: runner.models.MLP": "_target_: my_models.Net",
        "_target_: runner.data.digits": "_target_: os.system\n  command: touch was_imported",
        "defaults: [schema, base, _self_]": "defaults: [schema, base, _self_]\nhydra: {run: {dir: elsewhere}}",
    }.items():
        assert old in sound
        Path("rerun.yaml").write_text(sound.replace(old, new))
        client.log_artifact(run_id, "rerun.yaml")
        code, _, err = reproduce(capfd, run_id, uri)
        assert code == 2, new
        assert "rerun.yaml" in err
        assert not Path("was_imported").exists() and not Path("outputs").exists() and not Path("elsewhere").exists()


def test_reproduce_member_of_group_notes_it():
    notes = {"platform": "p", "machine": "m", "threads": "1"}
    beside, alone = (recorded.Making(None, "1", ("cpu", "c"), {"torch": "2"}, {**notes, **more}) for more in ({"together": "8 jobs"}, {}))  # fmt: skip
    (found,) = recorded.differing([beside, alone])
    assert (found.what, found.values) == ("together", ("8 jobs", "by itself"))
    assert recorded.differing([alone, alone]) == []
    assert [each.what for each in recorded.differing([beside, replace(alone, packages={})])] == ["versions"]
    assert recorded.unknown([beside, alone]) == recorded.unknown([alone, alone])
