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


def test_settings_are_restored(monkeypatch):
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


def test_experiment_is_created_once_with_artifact_root(client, uri):
    first = mlflow_store.experiment_of(client, "digits", uri=uri)
    assert mlflow_store.experiment_of(client, "digits", uri=uri) == first
    location = client.get_experiment(first[0]).artifact_location
    assert location.startswith("file:///") and location.endswith("/my%20store/mlartifacts")


def test_deleted_experiment_makes_a_numbered_one(client, uri):
    first, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    client.delete_experiment(first)
    second = mlflow_store.experiment_of(client, "digits", uri=uri)
    assert second[1] == "digits-2" and second[0] != first
    assert mlflow_store.experiment_of(client, "digits", uri=uri) == second
    client.delete_experiment(second[0])
    assert mlflow_store.experiment_of(client, "digits", uri=uri)[1] == "digits-3"


def test_run_is_created_once_per_uid(client, uri):
    experiment_id, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    start = {"run_name": "mlp " * 100, "start_ms": 5, "tags": {"mlflow.user": "ann", "device": "cpu"}}
    run_id, is_new = mlflow_store.find_or_create_run(client, experiment_id, start, uid="one")
    assert mlflow_store.find_or_create_run(client, experiment_id, start, uid="one") == (run_id, False) and is_new
    assert mlflow_store.find_or_create_run(client, experiment_id, start, uid="two")[0] != run_id
    run = client.get_run(run_id)
    assert run.info.start_time == 5 and run.data.tags["mlflow.user"] == "ann" and len(run.info.run_name) == 250


def test_check_run_separates_lost_from_deleted(client, uri):
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
def test_only_errors_of_values_are_refusals(raised, refused):
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
def test_error_is_one_line_without_password(raised, said):
    text = mlflow_store.explain(raised, uri="http://u:secret@h:1", experiment="team-a")
    assert said in text and "secret" not in text and "\n" not in text and len(text) <= 400


def test_older_database_names_the_upgrade_command(client, uri):
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
def test_parallel_processes_create_one_store(tmp_path, warm):
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
def test_killed_creation_leaves_no_broken_store(tmp_path, warm):
    path = tmp_path / "mlflow.db"
    making = tmp_path / ".mlflow.db.making"
    with warm.program([sys.executable, "-W", "ignore", "-c", CREATE, f"sqlite:///{path}", "0"]) as process:
        wait_for(lambda: making.exists() and making.stat().st_size, "the first of MLflow's tables")
        process.kill()
    assert making.exists() and not path.exists()
    client = mlflow_store.open_store(f"sqlite:///{path}")
    assert [found.name for found in client.search_experiments()] == ["Default"]
    assert path.exists() and not making.exists()


def test_experiment_search_ends_after_ten_names(client, uri, monkeypatch):
    monkeypatch.setattr(mlflow_store, "MAX_NAMES", 2)
    for _ in range(2):
        client.delete_experiment(mlflow_store.experiment_of(client, "digits", uri=uri)[0])
    with pytest.raises(Exception, match="2 experiments named digits were deleted; use"):
        mlflow_store.experiment_of(client, "digits", uri=uri)
    with pytest.raises(mlflow_store.ParentMissingError):
        mlflow_store.find_parent(client, "digits", uid="none")


def test_relative_store_is_in_current_directory(tmp_path, empty_store, monkeypatch):
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
