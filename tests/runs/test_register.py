"""`python -m runner register`: versions in a real registry, on sqlite and on a server."""

import functools
import json
import shutil
from pathlib import Path

import pytest
from trained_runs import NO_PICTURES

from runner.tracking import mlflow_store
from runner.tracking.sync import sync
from runner.training import checkpoint

WORDS = ["model=mlp", "model.hidden_sizes=[8]", "device=cpu", "train.num_epochs=1", "data.limit=200", NO_PICTURES]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]


@pytest.fixture
def versions(monkeypatch):
    """Return a name's entries in a store's registry: the version numbers, and the run of each alias."""
    for name, value in mlflow_store.SETTINGS.items():
        monkeypatch.setenv(name, value)

    def look(uri, name):
        client = mlflow_store.open_store(uri)
        found = {int(each.version): each for each in client.search_model_versions(f"name='{name}'")}
        aliases = client.get_registered_model(name).aliases
        return sorted(found), {alias: int(number) for alias, number in aliases.items()}, found

    return look


def test_on_sqlite(own_folder, run, versions, empty_store):
    shutil.copy(empty_store, "mlflow.db")
    assert run(*WORDS, "hydra.run.dir=outputs/a/run", "tracking.system_metrics=false")[0] == 0
    run_id = json.loads(Path("outputs/a/run/summary.json").read_text())["run_id"]
    uri = f"sqlite:///{own_folder}/mlflow.db"
    code, out, _ = run("register", "last", "--name", "digits", "--alias", "champion")
    assert code == 0 and "digits, version 1: run" in out
    numbers, aliases, found = versions(uri, "digits")
    assert (numbers, aliases) == ([1], {"champion": 1}) and found[1].run_id == run_id
    code, out, _ = run("register", run_id[:12], "--name", "digits", "--alias", "best")
    assert code == 0 and "version 1, as it was" in out
    assert versions(uri, "digits")[:2] == ([1], {"champion": 1, "best": 1})
    assert run("register", "last", "--name", "digits", "--alias", "champion", "--again")[0] == 0
    assert versions(uri, "digits")[:2] == ([1, 2], {"champion": 2, "best": 1})

    import mlflow
    import torch

    mlflow.set_tracking_uri(uri)
    try:
        assert mlflow.pytorch.load_model("models:/digits@champion")(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    finally:
        mlflow.set_tracking_uri(None)


def test_register_killed_run_takes_current_best(run, versions, tmp_path, empty_store):
    shutil.copytree("outputs/digits/run", tmp_path / "run")
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    words = ["register", str(tmp_path / "run"), "--name", "digits", f"tracking.uri={uri}"]
    assert "version 1: run" in run(*words)[1]
    best = tmp_path / "run/checkpoints/best.pt"
    for longer in (1, 2):
        state = checkpoint.load(best)
        checkpoint.save(state | {"step": state["step"] + 10}, best)  # the journal does not have it yet
        for expected in ("", ", as it was"):
            assert f"version {1 + longer}{expected}: run" in run(*words)[1]
    client, (numbers, _, found) = mlflow_store.open_store(uri), versions(uri, "digits")
    steps = {each.model_id: each.step for each in client.get_run(found[1].run_id).outputs.model_outputs}
    at = [steps[found[number].source.removeprefix("models:/")] for number in numbers]
    assert numbers == [1, 2, 3] and at[2] - at[1] == at[1] - at[0] == 10


def test_register_sends_missing_run(own_folder, run, versions, empty_store):
    """The run is untracked, and has no model in its journal."""
    shutil.copy(empty_store, "other.db")
    words = ["tracking.enabled=false", "tracking.log_model=false", "hydra.run.dir=outputs/a/run"]
    assert run(*WORDS, *words)[0] == 0
    assert not Path("outputs/a/run/journal/example.pt").exists()
    code, out, _ = run("register", "outputs/a/run", "--name", "it's", "tracking.uri=sqlite:///other.db")
    assert code == 0 and "other.db" in out
    assert run("register", "outputs/a/run", "--name", "it's", "tracking.uri=sqlite:///other.db")[0] == 0
    assert not Path("mlflow.db").exists()
    found = mlflow_store.open_store(f"sqlite:///{own_folder}/other.db").search_model_versions()
    assert [int(each.version) for each in found] == [1]


def test_register_without_answer_raises(own_folder, run, monkeypatch):
    monkeypatch.setattr("runner.runs.register.sync", functools.partial(sync, grace_seconds=0.1))
    assert run(*WORDS, "tracking.enabled=false", "hydra.run.dir=outputs/a/run")[0] == 0
    code, _, err = run("register", "last", "--name", "digits", "tracking.uri=http://user:secret@127.0.0.1:9")
    assert code == 2 and "does not answer" in err and "secret" not in err


def test_on_a_server(own_folder, run, versions, server):
    words = [f"tracking.uri={server.uri}", "tracking.system_metrics=false", "hydra.run.dir=outputs/a/run"]
    assert run(*WORDS, *words)[0] == 0
    for expected in ("digits, version 1: run", "version 1, as it was"):  # the run remembers its store
        code, out, _ = run("register", "last", "--name", "digits", "--alias", "champion")
        assert code == 0 and expected in out
    assert versions(server.uri, "digits")[:2] == ([1], {"champion": 1})
