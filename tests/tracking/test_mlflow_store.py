import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest
from waiting import wait_for

from runner.tracking import mlflow_store

CREATE = """
import sys
from runner.tracking import mlflow_store
with mlflow_store.settings():
    client = mlflow_store.open_store(sys.argv[1])
    sys.stdin.read(1)
    experiment_id, _ = mlflow_store.experiment_of(client, "digits", uri=sys.argv[1])
    print(experiment_id, mlflow_store.find_or_create_run(client, experiment_id, {"run_name": "r"}, uid=sys.argv[2])[0])
"""


def test_settings_are_put_back(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    with mlflow_store.settings():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"  # the user's timeout
        monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
        with mlflow_store.settings():
            assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "20"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "7" and "MLFLOW_DISABLE_TELEMETRY" not in os.environ


def test_an_experiment_is_made_once_with_its_artifacts_beside_the_database(client, uri):
    first = mlflow_store.experiment_of(client, "digits", uri=uri)
    assert mlflow_store.experiment_of(client, "digits", uri=uri) == first
    location = client.get_experiment(first[0]).artifact_location
    assert location.startswith("file:///") and location.endswith("/my%20store/mlartifacts")


def test_a_deleted_experiment_keeps_its_name_and_the_next_gets_a_number(client, uri):
    first, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    client.delete_experiment(first)
    second = mlflow_store.experiment_of(client, "digits", uri=uri)
    assert second[1] == "digits-2" and second[0] != first
    assert mlflow_store.experiment_of(client, "digits", uri=uri) == second
    client.delete_experiment(second[0])
    assert mlflow_store.experiment_of(client, "digits", uri=uri)[1] == "digits-3"


def test_a_run_is_made_once_for_each_uid(client, uri):
    experiment_id, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    start = {"run_name": "mlp " * 100, "start_ms": 5, "tags": {"mlflow.user": "ann", "device": "cpu"}}
    run_id, is_new = mlflow_store.find_or_create_run(client, experiment_id, start, uid="one")
    assert mlflow_store.find_or_create_run(client, experiment_id, start, uid="one") == (run_id, False) and is_new
    assert mlflow_store.find_or_create_run(client, experiment_id, start, uid="two")[0] != run_id
    run = client.get_run(run_id)
    assert run.info.start_time == 5 and run.data.tags["mlflow.user"] == "ann" and len(run.info.run_name) == 250


def test_it_tells_a_run_that_is_gone_from_one_that_was_deleted(client, uri):
    experiment_id, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    run_id, _ = mlflow_store.find_or_create_run(client, experiment_id, {}, uid="one")
    mlflow_store.check_run(client, run_id)
    client.delete_run(run_id)
    with pytest.raises(
        mlflow_store.RunDeletedError, match=f"mlflow runs restore --run-id {run_id}, then python -m runner sync"
    ):
        mlflow_store.check_run(client, run_id)
    with pytest.raises(mlflow_store.RunGoneError, match="no longer has the run 0000"):
        mlflow_store.check_run(client, "0000")


def error(code, *, rest=False, text="no"):
    from mlflow.exceptions import MlflowException, RestException
    from mlflow.protos.databricks_pb2 import ErrorCode

    if rest:
        return RestException({"error_code": code, "message": text})
    return MlflowException(text, error_code=ErrorCode.Value(code))


@pytest.mark.parametrize(
    ("raised", "refused"),
    [
        (error("INVALID_PARAMETER_VALUE"), True),
        (error("INVALID_PARAMETER_VALUE", rest=True), True),
        (error("BAD_REQUEST", rest=True), True),
        (error("BAD_REQUEST"), False),  # from a proxy, or a broken database
        (error("INTERNAL_ERROR", rest=True), False),
        (error("TEMPORARILY_UNAVAILABLE", rest=True), False),
        (error("RESOURCE_DOES_NOT_EXIST", rest=True), False),
        (error("UNAUTHENTICATED", rest=True), False),
        (ConnectionError("cut"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_only_what_is_wrong_with_the_value_itself_is_a_refusal(raised, refused):
    assert mlflow_store.is_refusal(raised) is refused


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            error("INTERNAL_ERROR", text="Max retries exceeded ... Connection refused"),
            "http://u:***@h:1 does not answer",
        ),
        (error("INTERNAL_ERROR", text="Failed to resolve 'h'"), "http://u:***@h:1 does not answer"),
        (error("INTERNAL_ERROR", text="Read timed out."), "http://u:***@h:1 does not answer in time"),
        (
            error("INTERNAL_ERROR", text="('Connection aborted.', RemoteDisconnected('Remote end closed'))"),
            "http://u:***@h:1 closed the connection",
        ),
        (error("UNAUTHENTICATED", rest=True), "refuses these credentials (MLFLOW_TRACKING_USERNAME"),
        (
            error("PERMISSION_DENIED", rest=True),
            "does not let you write to the experiment team-a: ask its owner, or use tracking.experiment=OTHER",
        ),
        (
            ModuleNotFoundError("no", name="boto3"),
            "boto3 is missing: run `pip install boto3`, then `python -m runner sync`",
        ),
        (
            error("INTERNAL_ERROR", text="Detected out-of-date database schema"),
            "mlflow db upgrade http://u:***@h:1`, then `python -m",
        ),
        (error("INTERNAL_ERROR", text="\n odd: http://u:secret@h:1 \nmore"), "odd: http://u:***@h:1"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (ValueError(), "ValueError"),
        (mlflow_store.RunGoneError("gone"), "gone"),
    ],
)
def test_an_error_is_one_line_with_its_mend_and_without_the_password(raised, said):
    text = mlflow_store.explain(raised, uri="http://u:secret@h:1", experiment="team-a")
    assert said in text and "secret" not in text and "\n" not in text and len(text) <= 400


def test_the_database_of_another_mlflow_names_its_mend(client, uri):
    path = mlflow_store.store_uri.sqlite_path(uri).with_name("old.db")
    with sqlite3.connect(mlflow_store.store_uri.sqlite_path(uri)) as source, sqlite3.connect(path) as target:
        source.backup(target)
        target.execute("UPDATE alembic_version SET version_num = 'older'")
    source.close()
    target.close()
    with pytest.raises(Exception) as caught:
        mlflow_store.open_store(f"sqlite:///{path}")
    assert f"mlflow db upgrade sqlite:///{path}" in mlflow_store.explain(caught.value, uri=f"sqlite:///{path}")


@pytest.mark.slow
def test_eight_processes_at_once_make_one_store_one_experiment_and_eight_runs(tmp_path, warm):
    assert multiprocessing.active_children() == []
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [warm.program([sys.executable, "-W", "ignore", "-c", CREATE, uri, str(n)], **pipe) for n in range(8)]
    answers = [process.communicate("\n") for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, answers
    made = [answer.split() for answer, _ in answers]
    assert len({experiment for experiment, _ in made}) == 1
    assert len({run for _, run in made}) == 8
    assert len(mlflow_store.open_store(uri).search_runs([made[0][0]])) == 8


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_makes_the_store_leaves_none_that_is_broken(tmp_path, warm):
    path = tmp_path / "mlflow.db"
    making = tmp_path / ".mlflow.db.making"
    with warm.program([sys.executable, "-W", "ignore", "-c", CREATE, f"sqlite:///{path}", "0"]) as process:
        wait_for(lambda: making.exists() and making.stat().st_size, "the first of MLflow's tables")
        process.kill()
    assert making.exists() and not path.exists()
    client = mlflow_store.open_store(f"sqlite:///{path}")
    assert [found.name for found in client.search_experiments()] == ["Default"]
    assert path.exists() and not making.exists()


def test_it_does_not_look_for_names_for_ever(client, uri, monkeypatch):
    monkeypatch.setattr(mlflow_store, "MAX_NAMES", 2)
    for _ in range(2):
        client.delete_experiment(mlflow_store.experiment_of(client, "digits", uri=uri)[0])
    with pytest.raises(Exception, match="2 experiments named digits were deleted; use"):
        mlflow_store.experiment_of(client, "digits", uri=uri)
    with pytest.raises(mlflow_store.ParentMissingError):
        mlflow_store.find_parent(client, "digits", uid="none")


def test_a_relative_store_is_the_one_of_the_folder_it_is_opened_in(tmp_path, empty_store, monkeypatch):
    """As in a notebook that changes its directory: MLflow keeps a store by its URI as long as the process runs."""
    names = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(empty_store, tmp_path / name / "mlflow.db")
        monkeypatch.chdir(tmp_path / name)
        client = mlflow_store.open_store("sqlite:///mlflow.db")
        client.create_experiment(name, str(tmp_path / name / "artifacts"))
        names.append({found.name for found in client.search_experiments()} - {"Default"})
    assert names == [{"one"}, {"two"}]
