"""The choice of the store: from the overrides, the environment or the run; and the store in a printed command."""

from pathlib import Path

import pytest
from refused import problems_of

from runner.config import origin
from runner.tracking import stores
from runner.tracking.ack import Ack, write_ack


@pytest.mark.parametrize(
    ("uri", "environment", "words"),
    [
        ("sqlite:///mlflow.db", None, ""),
        ("sqlite:///other.db", None, "tracking.uri=sqlite:///other.db"),
        ("sqlite:///two words.db", None, "'tracking.uri=sqlite:///two words.db'"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000", "tracking.uri=http://127.0.0.1:5000"),
        ("http://me:secret@host", None, "tracking.uri=http://me:PASSWORD@host"),
        ("http://me:secret@host", "http://other", "tracking.uri=http://me:PASSWORD@host"),
        ("http://me:secret@host", "http://me:secret@host", "# MLFLOW_TRACKING_URI names the store"),
    ],
)
def test_printed_command_names_store_without_password(own_folder, monkeypatch, uri, environment, words):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if environment is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", environment)
    assert stores.words_for(uri) == words


@pytest.mark.parametrize("store", [None, "", "http://me:***@host", "sqlite:////not/there/mlflow.db"], ids=str)
def test_unknown_store_is_an_error(own_folder, store, messages):
    Path("run").mkdir()
    if store is not None:
        origin.sign(Path("run"), store)
    messages(problems_of(stores.of_run, Path("run"), asked="sync run"))


def test_last_store_is_of_last_tracked_run(own_folder, messages):
    for name, store in (("first", "http://one"), ("second", ""), ("third", None)):
        Path(name).mkdir()
        if store is not None:
            origin.sign(Path(name), store)
    first, second, third = map(Path, ("first", "second", "third"))
    assert stores.of_last([second, first], asked="ui") == "http://one"
    messages(problems_of(stores.of_last, [third, second, first], asked="ui"))
    messages(problems_of(stores.of_last, [second], asked="ui"))
    Path("mlflow.db").touch()
    assert stores.of_last([], asked="ui") == stores.USUAL


def test_last_argument_replaces_the_environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert stores.named(["seed=1", "tracking.uri=http://one", "+tracking.uri='http://two'"]) == "http://two"
    assert stores.named(["seed=1"]) == "http://environment"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert stores.named([]) is None


@pytest.mark.parametrize(("uri", "write"), [("foo", "sqlite:///mlflow.db"), ("ftp://there", "sqlite:///mlflow.db")])
def test_invalid_store_is_refused_without_mlflow(uri, write):
    (problem,) = problems_of(stores.named, [f"tracking.uri={uri}"])
    assert (problem.source, problem.suggestions[0]) == (f"tracking.uri={uri}", f"tracking.uri={write}")


def test_store_without_file_is_accepted(own_folder):
    Path("run").mkdir()
    origin.sign(Path("run"), f"sqlite:///{own_folder}/later.db")
    assert stores.of_run(Path("run"), asked="sync run") == f"sqlite:///{own_folder}/later.db"


def test_page_is_of_last_run_in_store(tmp_path):
    folders = [tmp_path / name for name in ("new", "elsewhere", "here", "old")]
    for folder, store, experiment in zip(folders[1:], ("http://b", "http://a", "http://a"), "234", strict=True):
        write_ack(folder, Ack(uri=store, experiment_id=experiment))
    assert stores.page_of("http://a", folders) == "/#/experiments/3/runs?workflowType=machine_learning"
    assert stores.page_of("http://c", folders) == ""
