import json
import logging
import os
import shutil
import time

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from runner.runs.history import of_store
from runner.tracking import mlflow_events, mlflow_store, store_uri
from runner.tracking.ack import Ack, read_ack, write_ack
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events
from runner.tracking.sync import sync
from runner.tracking.system_metrics import Machine, SystemMetrics
from runner.tracking.uploader import Known, Uploader


def test_run_is_sent_as_written(folder, journal, write, upload, client):
    write.start(journal, uid="u1", tags={"device": "cpu", "mlflow.note.content": "hello", "mlflow.user": "ann"})
    write.rows(journal, 1, 700)
    write.rows(journal, 701, 1301)  # more points than MLflow accepts in one call
    journal.event("tags", tags={"late": 1})
    journal.event("params", params={"more": [1, 2]})
    write.end(journal)
    ack = upload()
    run = client.get_run(ack.run_id)
    expected = [(step, 1_700_000_000_000 + step, step + 0.1) for step in range(1, 2002)]
    assert write.history(client, ack.run_id, "train/accuracy") == expected
    assert run.data.metrics == {"train/loss": 2001.0, "train/accuracy": 2001.1}
    assert run.data.params == {"optimizer.lr": "0.1", "more": "[1, 2]"}
    assert run.data.tags | {"device": "cpu", "late": "1", "mlflow.user": "ann", "runner.uid": "u1"} == run.data.tags
    assert run.data.tags["mlflow.note.content"] == "hello"
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_100_000)
    assert (run.info.run_name, run.info.start_time) == ("mlp digits cpu", 1_700_000_000_000)
    assert client.get_experiment(run.info.experiment_id).name == "digits"
    assert ack.is_complete and ack.points_written == 4002 and ack == read_ack(folder)


def test_new_run_needs_no_requests(folder, journal, write, uri, monkeypatch):
    requests, get_run = [], MlflowClient.get_run
    monkeypatch.setattr(MlflowClient, "get_run", lambda *given: requests.append(given) or get_run(*given))
    for start_ms in (1_700_000_000_000, 1_700_000_600_000):  # a resumed run is measured at its age
        write.start(journal, uid="u1", system_metrics=True, start_ms=start_ms)
        uploader = Uploader(folder, uri, machine=Machine())
        assert uploader.attempt() and (requests == []) is (start_ms == 1_700_000_000_000)
        assert uploader._system_metrics._start_ms == 1_700_000_000_000
        uploader.leave()


@pytest.mark.parametrize("offset", [0, "middle"])
def test_points_sent_again_are_stored_once(folder, journal, write, upload, client, offset):
    write.start(journal, uid="u1")
    write.rows(journal, 1, 600)
    ack = upload()
    at = ack.offset
    write.rows(journal, 601, 600)
    write.end(journal)
    first = upload()
    # the store accepted it, and the process died before it could write that down
    write_ack(folder, Ack(uri=ack.uri) if offset == 0 else ack)
    second = upload()
    assert second.run_id == first.run_id and second.is_complete
    for name in ("train/loss", "train/accuracy"):
        assert [step for step, *_ in write.history(client, first.run_id, name)] == list(range(1, 1201))
    assert len(client.search_runs([first.experiment_id])) == 1 and at < first.offset


def test_nan_and_infinities_are_stored(journal, write, upload, client):
    write.start(journal)
    journal.points(("a",), [1, 2, 3], [1, 2, 3], [[np.nan], [np.inf], [-np.inf]])
    found = write.history(client, upload().run_id, "a")
    assert np.isnan(found[0][2]) and found[1][2] > 1e308 and found[2][2] < -1e308


def test_names_become_valid_and_values_short(journal, write, upload, client):
    write.start(journal, params={"model.layers[0]": 64, "text": "x" * 9000, "/odd=": 1}, tags={"a@b": "y" * 9000})
    journal.points(("acc[0]", "loss@x"), [1], [1], [[1.0, 2.0]])
    ack = upload()
    data = client.get_run(ack.run_id).data
    assert data.params["model.layers.0"] == "64" and data.params["odd_"] == "1" and len(data.params["text"]) == 6000
    assert len(data.tags["a_b"]) == 8000 and data.metrics == {"acc.0": 1.0, "loss_x": 2.0}
    assert ack.warnings == () and ack.points_rejected == 0


TWO = ("train/p>0.5", "train/p<0.5")  # MLflow accepts neither, and would replace both by the same name


@pytest.mark.parametrize("most", [None, 100])
def test_metrics_with_equal_names_stay_distinct(folder, journal, write, upload, client, uri, empty_store, most):
    plan = {"most": most, "expected": 300}
    write.start(journal, points=plan)
    write.rows(journal, 1, 100, names=("train/loss", TWO[0]))
    upload()
    write.rows(journal, 101, 100, names=TWO[::-1])  # another sender, as after a kill
    upload()
    write.start(journal, uid=read_events(folder)[0]["uid"], points=plan)
    write.rows(journal, 201, 100, names=TWO[::-1])
    write.end(journal)
    ack = upload()
    metrics = client.get_run(ack.run_id).data.metrics
    (other,) = metrics.keys() - {"train/loss", "train/p_0.5"}
    assert other.startswith("train/p_0.5_") and (metrics["train/p_0.5"], metrics[other]) == (300.1, 300.0)
    stored = {name: [point[::2] for point in write.history(client, ack.run_id, name)] for name in metrics}
    assert [value - step for step, value in stored[other]] == [0.0] * len(stored[other])
    assert all(step < value for step, value in stored["train/p_0.5"])
    assert stored["train/p_0.5"][0][0] == 1 and stored[other][0][0] == 101
    if most is None:
        assert [step for step, _ in stored["train/p_0.5"]] == list(range(1, 301))
    else:
        assert ack.points_left_out
        read = of_store(client, client.get_run(ack.run_id))  # the Parquet file with all points
        assert {name: series[2][-1] for name, series in read.items()} == metrics
    shutil.copy(empty_store, folder / "second.db")
    again = sync(folder, f"sqlite:///{folder}/second.db")
    found = mlflow_store.open_store(f"sqlite:///{folder}/second.db").get_run(again.run_id)
    assert found.data.metrics == metrics


def test_changed_param_is_refused_without_others(folder, journal, write, upload, client):
    write.start(journal, params={f"p{n}": n for n in range(250)})
    journal.event("params", params={"p7": "other", "new": 1})
    write.end(journal)
    ack = upload()
    params = client.get_run(ack.run_id).data.params
    assert len(params) == 251 and params["p7"] == "7" and params["new"] == "1" and ack.is_complete
    assert len(ack.warnings) == 1 and "the param p7 was refused" in ack.warnings[0]
    (line,) = (folder / "journal" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == "p7" and json.loads(line)["kind"] == "param"


class Picky:
    """A client whose store refuses some points (name, step) and params."""

    def __init__(self, client, *, poison):
        self._client, self.poison = client, poison

    def log_batch(self, run_id, metrics=(), params=(), **others):
        if self.poison & {*((metric.key, metric.step) for metric in metrics), *(param.key for param in params)}:
            raise MlflowException.invalid_parameter_value("no such point here")
        self._client.log_batch(run_id, metrics=metrics, params=params, **others)

    def __getattr__(self, name):
        return getattr(self._client, name)


def test_refused_values_are_left_out_without_others(folder, journal, write, client, uri, monkeypatch):
    poison = {("train/loss", 400), ("train/loss", 500), ("train/accuracy", 7)}  # 500 is the newest point of its name
    poison |= {("train/loss", 503)}  # from a later call
    monkeypatch.setattr(mlflow_store, "open_store", lambda uri: Picky(client, poison={*poison, "p1"}))
    write.start(journal, params={"p1": "1", "p2": "2"})
    write.rows(journal, 1, 500)
    assert Uploader(folder, uri).attempt(most=1)  # only makes the run
    uploader = Uploader(folder, uri)
    assert uploader.attempt() and uploader.ack.points_rejected == 3
    write.rows(journal, 501, 5)
    write.end(journal)
    assert uploader.attempt()
    ack = uploader.ack
    assert ack.is_complete and ack.points_rejected == 4 and ack.points_written == 1006
    lines = [json.loads(line) for line in (folder / "journal" / "rejected.jsonl").read_text().splitlines()]
    assert client.get_run(ack.run_id).data.params == {"p2": "2"} and len(ack.warnings) == 1
    assert {(line["key"], line["step"], line["value"], line["timestamp"]) for line in lines if "step" in line} == {
        (key, step, step + (0.1 if "acc" in key else 0), 1_700_000_000_000 + step) for key, step in poison
    }
    assert {line["why"] for line in lines} == {"no such point here"}
    assert len(write.history(client, ack.run_id, "train/loss")) == 502


@pytest.mark.parametrize("is_gone", [False, True])
def test_params_after_interrupted_call_are_complete(folder, journal, write, client, uri, monkeypatch, is_gone):
    """The params of the first call are stored and not sent again; or the run is gone with its params."""

    class Breaking(Picky):
        calls = 0

        def log_batch(self, run_id, params=(), **others):
            self.calls += bool(params)
            if params and self.calls == 2:
                if is_gone:
                    client.set_tag(run_id, "runner.uid", "of another")
                    raise mlflow_store.RunGoneError("gone")
                raise ConnectionError("cut")
            super().log_batch(run_id, params=params, **others)

    breaking = Breaking(client, poison=set())
    monkeypatch.setattr(mlflow_store, "open_store", lambda uri: breaking)
    params = {f"p{n}": str(n) for n in range(250)}
    write.start(journal, params=params)
    write.end(journal)
    uploader = Uploader(folder, uri)
    assert not uploader.attempt() and uploader.attempt() and uploader.ack.is_complete
    assert client.get_run(uploader.ack.run_id).data.params == params


def recreate(uri, empty_store):
    other = store_uri.sqlite_path(uri).with_name("anew.db")
    shutil.copy(empty_store, other)
    other.replace(store_uri.sqlite_path(uri))
    # a new process would not know the old file, but MLflow keeps it open in this one
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for engine in SqlAlchemyStore._engine_map.values():
        engine.dispose()


def test_recreated_store_gets_everything_again(folder, journal, write, upload, uri, empty_store):
    write.start(journal)
    write.rows(journal, 1, 50)
    write.end(journal)
    first = upload()
    recreate(uri, empty_store)
    uploader = Uploader(folder, uri)
    assert not uploader.attempt() and uploader.ack.offset == 0 and uploader.ack.run_id is None
    assert uploader.attempt() and uploader.ack.is_complete and uploader.ack.run_id != first.run_id
    assert len(write.history(mlflow_store.open_store(uri), uploader.ack.run_id, "train/loss")) == 50


def test_deleted_run_waits_until_restored(folder, journal, write, client, uri):
    write.start(journal)
    first = Uploader(folder, uri)
    assert first.attempt()
    client.delete_run(first.ack.run_id)
    write.rows(journal, 1, 500)
    write.end(journal)
    for uploader in (first, Uploader(folder, uri)):  # deleted while it sends, and before
        assert not uploader.attempt() and "mlflow runs restore" in uploader.ack.error
        assert uploader.ack.points_rejected == 0 and read_ack(folder).points_pending == 1000
        assert not (folder / "journal" / "rejected.jsonl").exists()
    client.restore_run(first.ack.run_id)
    assert uploader.attempt() and uploader.ack.is_complete and uploader.ack.error is None
    assert len(write.history(client, first.ack.run_id, "train/loss")) == 500


def test_deleted_experiment_stays_deleted(journal, write, upload, client):
    old = client.create_experiment("digits")
    client.delete_experiment(old)
    write.start(journal)
    ack = upload()
    assert client.get_experiment(ack.experiment_id).name == "digits-2"
    assert "this run is in digits-2" in ack.warnings[0]


def test_run_without_end_is_killed_until_end(folder, journal, write, uri, client):
    write.start(journal)
    uploader = Uploader(folder, uri)
    assert uploader.abandon() and uploader.ack.run_id is None  # nothing was sent, so nothing is marked
    an_hour_ago = time.time() - 3600
    os.utime(journal.path, (an_hour_ago, an_hour_ago))  # the end time is that of the journal, whenever it is sent
    assert uploader.attempt() and uploader.abandon() and uploader.abandon()
    run = client.get_run(uploader.ack.run_id)
    assert run.info.status == "KILLED" and run.data.tags["runner.end"] == "the process was killed"
    assert abs(run.info.end_time / 1000 - an_hour_ago) < 1 and uploader.ack.state == "died"
    write.end(journal)
    again = Uploader(folder, uri)
    assert again.attempt() and again.abandon()  # an ended run stays ended
    run = client.get_run(run.info.run_id)
    assert run.info.status == "FINISHED" and "runner.end" not in run.data.tags and read_ack(folder).state == "ended"


def test_data_set_sent_again_is_stored_once(folder, journal, write, upload, client):
    write.start(journal)
    journal.event(
        "dataset",
        name="digits" * 200,
        digest="d" * 64,
        source="scikit-learn",
        source_type="local",
        schema='{"facts": {}}',
        profile='{"num_rows": 5}',
        context="training",
    )
    ack = upload()
    write_ack(folder, Ack(uri=ack.uri))
    upload()
    (given,) = client.get_run(ack.run_id).inputs.dataset_inputs
    assert given.dataset.digest == "d" * 36 and given.dataset.source == '{"uri": "scikit-learn"}'
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "training")]
    assert ack.warnings == ()


def test_files_and_folders_become_artifacts(folder, journal, write, upload, client, uri):
    (folder / "plots" / "inner").mkdir(parents=True)
    (folder / "rerun.yaml").write_text("a: 1")
    (folder / "plots" / "loss.png").write_text("png")
    (folder / "plots" / "inner" / "x.png").write_text("png")
    write.start(journal)
    journal.event("artifact", path="rerun.yaml", to="")
    journal.event("artifact", path="plots", to="plots")
    journal.event("artifact", path="rerun.yaml", to="configs")
    journal.event("artifact", path="missing.txt", to="")
    write.end(journal)
    ack = upload()
    paths = {
        found.path
        for at in (None, "plots", "plots/inner", "configs")
        for found in client.list_artifacts(ack.run_id, at)
    }
    assert {"rerun.yaml", "plots/loss.png", "plots/inner/x.png", "configs/rerun.yaml"} <= paths
    assert ack.is_complete and len(ack.warnings) == 1 and "missing.txt does not exist" in ack.warnings[0]
    assert (store_uri.sqlite_path(uri).parent / "mlartifacts" / ack.run_id / "artifacts" / "rerun.yaml").is_file()


def test_failed_file_waits_without_delaying_others(folder, journal, write, uri, client, monkeypatch):
    whole = mlflow_events.log_artifact
    late = {"a.txt", "b.txt"}

    def full(client, run_id, folder, event):
        if event["path"] in late:
            raise OSError(28, "No space left on device")
        whole(client, run_id, folder, event)

    write.start(journal)
    for name in sorted(late):
        (folder / name).write_text(name)
        journal.event("artifact", path=name, to="")
    write.rows(journal, 1, 10)
    write.end(journal)
    monkeypatch.setattr(mlflow_events, "log_artifact", full)
    assert Uploader(folder, uri).attempt() and len(read_ack(folder).postponed) == 2
    for left in (["b.txt"], []):
        late.intersection_update(left)
        assert Uploader(folder, uri).attempt(postponed=True) is not bool(left)
        ack = read_ack(folder)
        assert ack.ended and ack.points_written == 20 and ack.is_complete is not bool(left)
        assert [event["path"] for event in ack.postponed] == left
        assert ack.error == ("artifact b.txt waits: OSError: [Errno 28] No space left on device" if left else None)
    assert [found.path for found in client.list_artifacts(ack.run_id)] == ["a.txt", "b.txt"]


def test_journal_of_another_run_makes_another(folder, journal, write, upload, client):
    write.start(journal, uid="u1")
    write.rows(journal, 1, 10)
    first = upload()
    write.start(journal, uid="u2")
    write.rows(journal, 1, 5)
    second = upload()
    assert first.run_id != second.run_id and second.uid == "u2"
    for ack, count in ((first, 10), (second, 5)):
        assert client.get_run(ack.run_id).data.tags["runner.uid"] == ack.uid
        assert len(write.history(client, ack.run_id, "train/loss")) == count


def test_outage_at_second_attempt_keeps_waiting(folder, journal, write, uri, client, monkeypatch):
    def fail(*args):
        raise OSError("not now")

    (folder / "a.txt").write_text("a")
    write.start(journal)
    journal.event("artifact", path="a.txt", to="")
    write.end(journal)
    monkeypatch.setattr(mlflow_events, "log_artifact", fail)
    uploader = Uploader(folder, uri)
    assert uploader.attempt() and len(read_ack(folder).postponed) == 1
    monkeypatch.setattr(mlflow_store, "check_run", fail)  # from now on, the store does not answer
    assert not uploader.attempt(postponed=True)
    assert len(read_ack(folder).postponed) == 1 and not read_ack(folder).is_complete
    monkeypatch.setattr(mlflow_events, "log_artifact", lambda *args: 1 / 0 if read_ack(folder).postponed else None)
    assert not uploader.attempt(postponed=True)  # it also stays on the disk while it is being sent
    monkeypatch.undo()
    assert Uploader(folder, uri).attempt(postponed=True) and read_ack(folder).is_complete
    assert [found.path for found in client.list_artifacts(uploader.ack.run_id)] == ["a.txt"]


def test_changed_param_of_resumed_run_is_reported(folder, journal, write, uri, client, monkeypatch):
    sent = []

    class Counting(Picky):
        def log_batch(self, run_id, params=(), **others):
            sent.extend(param.key for param in params)
            self._client.log_batch(run_id, params=params, **others)

    monkeypatch.setattr(mlflow_store, "open_store", lambda uri: Counting(client, poison=set()))
    write.start(journal, uid="u1", params={f"p{n}": n for n in range(50)})
    write.start(journal, uid="u1", params={f"p{n}": n if n != 7 else "other" for n in range(51)})
    uploader = Uploader(folder, uri)
    assert uploader.attempt()
    assert len(sent) == 51 and client.get_run(uploader.ack.run_id).data.params["p7"] == "7"
    assert uploader.ack.warnings == (
        "the param p7 was refused: its value in MLflow is 7, and MLflow does not change params",
    )


def test_outage_loses_nothing(folder, journal, write, uri, client, monkeypatch, caplog):
    write.start(journal)
    uploader = Uploader(folder, uri)
    assert uploader.attempt()
    write.rows(journal, 1, 10)

    def cut(*args, **more):
        raise ConnectionError("the line was cut")

    with monkeypatch.context() as outage, caplog.at_level(logging.WARNING, "runner.tracking"):
        outage.setattr(type(client), "log_batch", cut)
        for _ in range(3):
            assert not uploader.attempt()
    assert len(caplog.records) == 1  # an outage is reported once
    assert uploader.ack.error == "ConnectionError: the line was cut" and uploader.ack.state == "failing"
    assert uploader.attempt() and uploader.ack.points_written == 20 and uploader.ack.error is None


def test_event_of_later_version_is_left_out(journal, write, upload):
    write.start(journal)
    journal.event("hologram", of="loss")
    write.end(journal)
    ack = upload()
    assert ack.is_complete and "the event `hologram` is unknown to this version" in ack.warnings[0]


def test_journal_without_start_is_reported(folder, journal, write, uri):
    write.rows(journal, 1, 1)
    uploader = Uploader(folder, uri)
    assert not uploader.attempt() and "does not begin with the start of a run" in uploader.ack.error


def test_ack_of_another_journal_is_discarded(folder, journal, write, upload):
    write.start(journal)
    write.rows(journal, 1, 5)
    ack = upload()
    for offset in (ack.offset + 1, ack.offset - 1, 10**9):
        write_ack(folder, Ack(offset=offset, uri=ack.uri, run_id=ack.run_id, points_written=99))
        assert upload().points_written == 10


def test_machine_is_measured_while_run_is_running(folder, journal, write, uri, monkeypatch):
    monkeypatch.setattr(SystemMetrics, "sample", lambda self, now=False, sends=True: samples.append(now))
    samples = []
    write.start(journal, system_metrics=True)
    uploader = Uploader(folder, uri, machine=Machine())
    assert uploader.attempt()
    uploader.sample()
    write.end(journal)
    assert uploader.attempt() and samples[-1] is True
    uploader.sample()
    assert samples[-1] is True


def test_turn_sends_one_item_files_last(folder, journal, write, uri, client, monkeypatch):
    write.start(journal)
    journal.event("artifact", path="a.txt", to="")
    write.rows(journal, 1, 700)
    write.rows(journal, 701, 700)
    (folder / "a.txt").write_text("a")
    uploader, reached, tried = Uploader(folder, uri), [], []
    with monkeypatch.context() as full:
        full.setattr(mlflow_events, "log_artifact", lambda *args: tried.append(0) or 1 / 0)
        while uploader.has_more():
            assert uploader.attempt(postponed=True, most=1) is uploader.has_more()
            reached.append(uploader.ack.points_written)
    assert len(tried) == 1  # after everything else was sent
    assert reached == [0, 0, 1400, 2800, 2800] and uploader.only_waits() and not uploader.only_waits_for_parent()
    assert uploader.attempt(postponed=True, most=1) and not uploader.only_waits()
    assert [found.path for found in client.list_artifacts(uploader.ack.run_id)] == ["a.txt"]


PARENT = {"uid": "p1", "experiment": "digits"}


def two_runs(tmp_path, write):
    """Write the journals of a sweep and a job, in directories that sort in the wrong order."""
    child, parent = tmp_path / "a", tmp_path / "b"
    with Journal(child) as journal:
        write.start(journal, uid="c1")
        journal.event("parent", **PARENT)
        write.rows(journal, 1, 5)
        write.end(journal)
    with Journal(parent) as journal:
        write.start(journal, uid="p1")
        write.end(journal)
    return child, parent


def test_refused_parent_link_is_not_sent_again(tmp_path, write, uri, client, monkeypatch, caplog):
    class WithoutLinks(Picky):
        def set_tag(self, run_id, key, value):
            if key == mlflow_store.PARENT_TAG:
                raise MlflowException.invalid_parameter_value("no links here")
            self._client.set_tag(run_id, key, value)

    child, parent = two_runs(tmp_path, write)
    sync(parent, uri)
    monkeypatch.setattr(mlflow_store, "open_store", lambda uri: WithoutLinks(client, poison=set()))
    first, second = sync(child, uri), sync(child, uri)
    assert first.is_complete and first.warnings == ("parent was refused: no links here",)
    assert second == first and "is sent again" not in caplog.text


def test_child_before_its_parent_is_linked_later(tmp_path, write, uri, client):
    child, parent = two_runs(tmp_path, write)
    before = sync(child, uri, grace_seconds=1000)  # it does not wait, as only the parent's sync can help
    assert before.ended and before.points_written == 10 and not before.is_complete
    assert before.error == "parent waits: the parent run is not in digits yet"
    parent_id, after = sync(parent, uri).run_id, sync(child, uri)
    assert after.is_complete and after.error is None
    assert client.get_run(after.run_id).data.tags["mlflow.parentRunId"] == parent_id


def test_child_in_a_new_store_waits_for_its_parent(tmp_path, write, uri, client, empty_store):
    (child, parent), known = two_runs(tmp_path, write), Known()
    assert all(Uploader(folder, uri, known=known).attempt() for folder in (parent, child))
    recreate(uri, empty_store)
    later, first = (Uploader(folder, uri, known=known) for folder in (child, parent))
    assert not later.attempt() and not later.attempt(postponed=True) and "parent waits" in later.ack.error
    assert not first.attempt() and first.attempt() and later.attempt(postponed=True)
    assert client.get_run(later.ack.run_id).data.tags["mlflow.parentRunId"] == first.ack.run_id


def test_killed_child_without_parent_is_marked(folder, journal, write, uri, client):
    write.start(journal)
    journal.event("parent", **PARENT)
    journal.close()
    ack = sync(folder, uri)
    assert ack.died and not ack.is_complete and "parent waits" in ack.error
    assert client.get_run(ack.run_id).info.status == "KILLED"


def test_parent_is_found_in_numbered_experiment(tmp_path, write, uri, client):
    client.delete_experiment(client.create_experiment("digits"))
    child, parent = two_runs(tmp_path, write)
    parent_id, ack = sync(parent, uri).run_id, sync(child, uri)
    assert client.get_experiment(client.get_run(parent_id).info.experiment_id).name == "digits-2"
    assert ack.is_complete and client.get_run(ack.run_id).data.tags["mlflow.parentRunId"] == parent_id


def test_deleted_parent_is_linked_without_another(tmp_path, write, uri, client):
    child, parent = two_runs(tmp_path, write)
    parent_id = sync(parent, uri).run_id
    client.delete_experiment(client.get_experiment_by_name("digits").experiment_id)
    ack = sync(child, uri)
    assert ack.is_complete and client.get_run(ack.run_id).data.tags["mlflow.parentRunId"] == parent_id


@pytest.mark.parametrize("status", ["KILLED", None])
def test_run_resumed_after_end_stays_one(folder, write, uri, client, empty_store, status):
    with Journal(folder) as journal:
        write.start(journal, uid="u1")
        write.rows(journal, 1, 10)
        if status:
            write.end(journal, status)
    first = sync(folder, uri)  # None: after a SIGKILL, the journal has no end
    assert client.get_run(first.run_id).info.status == "KILLED"
    with Journal(folder) as journal:
        write.rows(journal, 11, 10)
        write.start(journal, uid="u1", start_ms=1_700_000_050_000, params={"optimizer.lr": "0.1", "more": 1})
        assert Uploader(folder, uri).attempt() and client.get_run(first.run_id).info.status == "RUNNING"
        write.rows(journal, 21, 10)
        write.end(journal)
    second = sync(folder, uri)
    other = store_uri.sqlite_path(uri).with_name("other.db")
    shutil.copy(empty_store, other)
    elsewhere = sync(folder, f"sqlite:///{other}")
    assert second.run_id == first.run_id and second.is_complete and second.points_written == 60
    for reader, run_id in ((client, first.run_id), (mlflow_store.open_store(f"sqlite:///{other}"), elsewhere.run_id)):
        run = reader.get_run(run_id)
        assert run.info.status == "FINISHED" and "runner.end" not in run.data.tags
        assert run.data.params == {"optimizer.lr": "0.1", "more": "1"}
        assert [step for step, *_ in write.history(reader, run_id, "train/loss")] == list(range(1, 31))
        assert len(reader.search_runs([run.info.experiment_id])) == 1
