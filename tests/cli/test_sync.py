"""`python -m runner sync`: each run to its store, and to another one only on request."""

import shutil
from pathlib import Path

import pytest

from runner import cli
from runner.config import origin
from runner.experiment.summary import Summary
from runner.tracking import mlflow_store as store
from runner.tracking.ack import read_ack
from runner.tracking.journal import Journal


@pytest.fixture(autouse=True)
def nowhere(own_folder, monkeypatch, patience):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def run(write):
    """Return a function that writes a run of three steps, tracked to `store` (None: not created here)."""

    def leave(folder, store):
        folder = Path(folder)
        with Journal(folder) as journal:
            write.start(journal)
            write.rows(journal, 1, 3)
            write.end(journal)
        Summary("finished").write(folder)
        if store is not None:
            origin.sign(folder, store)
        return folder

    return leave


@pytest.fixture
def stores(own_folder, empty_store):
    """Two empty stores."""
    return [f"sqlite:///{shutil.copy(empty_store, own_folder / name)}" for name in ("one.db", "other.db")]


def test_sync_sends_each_run_to_its_store(run, stores, capfd):
    runs = [run(f"outputs/a/{number}", uri) for number, uri in enumerate(stores)]
    untracked = run("outputs/a/untracked", "")
    assert cli.main(["sync"]) == 0
    shown = capfd.readouterr().out
    for folder, uri in zip(runs, stores, strict=True):
        ack = read_ack(folder)
        assert store.open_store(uri).get_run(ack.run_id).info.status == "FINISHED"
        assert len(store.open_store(uri).search_runs(["1"])) == 1
        summary = Summary.read(folder)
        assert (summary.run_id, summary.tracking_uri) == (ack.run_id, uri)
        assert summary.tracker == {"points_written": 6, "points_pending": 0}
        assert f"1 of 1 runs are complete in {uri}" in shown
    assert "tracking.enabled=false" in shown and read_ack(untracked).run_id is None
    assert not Path("mlflow.db").exists()


def test_sync_untrusted_run_needs_named_store(run, stores, capfd):
    own, stranger = run("outputs/a/own", stores[0]), run("outputs/a/stranger", None)
    assert cli.main(["sync"]) == 2
    said = capfd.readouterr()
    assert read_ack(own).is_complete and read_ack(stranger).run_id is None
    assert "sync outputs/a/stranger tracking.uri=URI" in said.err and "was not made here by you" in said.err
    assert cli.main(["sync", "outputs/a/stranger", f"tracking.uri={stores[1]}"]) == 0
    assert cli.main(["sync", "outputs/a/stranger"]) == 2  # that is not enough to trust it


def test_sync_to_other_store_is_remembered(run, stores):
    folder = run("outputs/a/run", "http://127.0.0.1:9")
    assert cli.main(["sync", f"tracking.uri={stores[0]}"]) == 0
    assert cli.main(["sync"]) == 0
    assert origin.store_of(folder) == stores[0]


def test_folder_with_blank_is_quoted_in_suggestions(run, stores, capfd):
    run("outputs/a b/0", ""), run("outputs/a b/1", None), run("outputs/a b/2", stores[0])
    Path("outputs/a b/2/my link").symlink_to("/")
    assert cli.main(["sync"]) == 2
    said = capfd.readouterr()
    assert "; sync 'outputs/a b/0' tracking.uri=URI" in said.out and "; rm -- 'outputs/a b/2/my link'" in said.out
    assert "help: run `sync 'outputs/a b/1' tracking.uri=URI`" in said.err


@pytest.mark.parametrize(
    ("its_own", "so"),
    [
        (0, "still running, and sent by its own process"),
        (1, "its own process sends it to sqlite:///{other}: sync outputs/a/run tracking.uri="),
        ("", "its own process sends it nowhere (tracking.enabled=false): sync outputs/a/run "),
        (None, "still running: sync outputs/a/run "),
    ],
)
def test_what_is_still_running_is_not_complete(run, stores, write, own_folder, capfd, its_own, so):
    folder = run("outputs/a/run", stores[its_own] if isinstance(its_own, int) else its_own)
    with Journal(folder):
        assert cli.main(["sync", f"tracking.uri={stores[0]}"]) == 1
    said = capfd.readouterr().out
    assert so.format(other=own_folder / "other.db") in said and "0 of 1 runs are complete" in said


@pytest.mark.parametrize(
    ("words", "so"),
    [
        (["sync"], "no run is below outputs or multirun"),
        (["sync", "run"], "there is no `journal/journal.bin` below"),
        (["sync", "run", "tracking.uri=sqlite:///runs.db"], "there is no `journal/journal.bin` below"),
        (["ui"], "no run in outputs or multirun was tracked"),
    ],
)
def test_sync_without_runs_is_an_error(own_folder, capfd, words, so):
    Summary("finished").write(Path("run"))
    assert cli.main(words) == 2
    assert so in capfd.readouterr().err
    assert not list(own_folder.glob("*.db"))
