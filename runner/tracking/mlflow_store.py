"""Open an MLflow store, find experiments, and create a run once, however often it is tried. A training never opens a store."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from runner.config.importing import loading
from runner.tracking import store_uri
from runner.tracking.mlflow_names import MAX_NAME, MAX_TAG, TOO_LONG, cut, valid_names

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run
    from mlflow.exceptions import MlflowException

UID_TAG = "runner.uid"
PARENT_TAG = "mlflow.parentRunId"
#: MLflow's page opens on training runs, not on traces of language models
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
#: without MLflow's retries, which block for four minutes; a repeated creation would make a second run
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_UV_AUTO_DETECT": "false",  # else a model includes the pyproject.toml of the current directory
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
TIMEOUT, TIMEOUT_SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT", "20"  # of a complete answer; a user's value wins

MAX_NAMES = 10  # NAME, NAME-2, ...: deleted experiments that are skipped
MAX_TEXT = 100_000  # characters of an error, which may contain the complete answer


class RunGoneError(Exception):
    """The store has lost the run: its journal is sent again."""


class RunDeletedError(Exception):
    """The run is in MLflow's trash, and takes nothing until it is restored."""


class ParentMissingError(Exception):
    """The parent run is not in the store yet: its own journal creates it."""


@contextmanager
def settings() -> Iterator[None]:
    """Use MLflow with this project's time-outs and retries, and without its warnings, in the block. Imports MLflow (1 s)."""
    ours = {TIMEOUT: os.environ.get(TIMEOUT, TIMEOUT_SECONDS), **SETTINGS}
    try:
        Path.home()
    except RuntimeError:  # without HOME and a known user, MLflow can't be imported
        ours["HOME"] = tempfile.gettempdir()
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow 3.17 uses what SQLAlchemy 2.1 deprecates
            with loading():
                from runner.tracking.deadline import deadlines  # imports MLflow
            with deadlines():
                yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def load_sqlite() -> None:
    """Import what MLflow's sqlite store needs (1.5 s), without Mako's plugin for colors (0.3 s)."""
    unused = "mako.ext.pygmentplugin"
    is_new = unused not in sys.modules
    if is_new:
        sys.modules[unused] = None  # type: ignore[assignment]  # optional in Mako
    try:
        with loading():
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    finally:
        if is_new:
            del sys.modules[unused]


def open_store(uri: str) -> MlflowClient:
    """Open the store; imports MLflow (about 1 s), and creates a new sqlite store (about 2 s).

    One process at a time creates it, as MLflow's migrations fail otherwise.

    Raises:
        Exception: Of MLflow; the call can be repeated.
    """
    from mlflow import MlflowClient

    path = store_uri.sqlite_path(uri)
    if path is None:
        return MlflowClient(uri)
    lock = FileLock(store_uri.creation_lock(path), timeout=120, thread_local=False)
    with loading(), lock:  # alembic imports 60 migrations
        if not path.exists():
            _make_database(path)
        client = MlflowClient(store_uri.absolute(uri))
        client.search_experiments(max_results=1)  # opens the database
    return client


def _make_database(path: Path) -> None:
    """Create a sqlite store under another name, then rename it: MLflow can't continue an interrupted migration."""
    from mlflow import MlflowClient

    making = path.with_name(f".{path.name}.making")
    for left in (making, making.with_name(f"{making.name}-journal")):
        left.unlink(missing_ok=True)
    client = MlflowClient(f"sqlite:///{making}")
    client.search_experiments(max_results=1)
    store: Any = client._tracking_client.store
    store.engine.dispose()  # closes the connection to the file before it is renamed
    making.replace(path)


def problem(uri: str) -> str | None:
    """Return why the store does not answer a small request (5 ms), or None."""
    try:
        open_store(uri).search_experiments(max_results=1)
    except Exception as error:
        return explain(error, uri=uri)
    return None


def experiment_of(client: MlflowClient, name: str, *, uri: str) -> tuple[str, str]:
    """Find or create an experiment; return its id and name. If NAME is in MLflow's trash, it is NAME-2, NAME-3, ..."""
    from mlflow.exceptions import MlflowException

    for wanted, found in itertools.islice(_candidates(client, name), MAX_NAMES):
        if found is None:
            try:
                made = client.create_experiment(wanted, store_uri.artifact_root(uri), EXPERIMENT_TAGS)
                return _with_id(made, f"the new experiment {wanted}"), wanted
            except MlflowException as error:  # another run may have created it
                found = client.get_experiment_by_name(wanted)
                if found is None:
                    raise error from None
        if found.lifecycle_stage == "active":
            return found.experiment_id, wanted
    raise MlflowException(f"{MAX_NAMES} experiments named {name} were deleted; use tracking.experiment=OTHER")


def _candidates(client: MlflowClient, name: str) -> Iterator[tuple[str, Experiment | None]]:
    """Yield NAME, NAME-2, ... and their experiments, up to the first that does not exist (None)."""
    for number in itertools.count(1):
        wanted = name if number == 1 else f"{name}-{number}"
        found = client.get_experiment_by_name(wanted)
        if found is not None:
            _with_id(found.experiment_id, f"the experiment {wanted}")
        yield wanted, found
        if found is None:
            return


def _with_id(number: str, what: str) -> str:
    from mlflow.exceptions import MlflowException

    if not number:
        raise MlflowException(f"the store answers without an id of {what}: is it an MLflow server?")
    return number


def find_or_create_run(
    client: MlflowClient, experiment_id: str, start: Mapping[str, Any], *, uid: str, parent_id: str | None = None
) -> tuple[str, bool]:
    """Find the run with this uid, or create it with the tags of `start`.

    An earlier creation may have lost only its answer, so it is searched for first.

    Returns:
        The run's id, and whether it is new and has all tags.
    """
    from mlflow.entities import ViewType

    wanted = f"tags.`{UID_TAG}` = '{uid}'"
    order = ["attributes.start_time ASC"]
    found = client.search_runs([experiment_id], wanted, run_view_type=ViewType.ALL, max_results=1, order_by=order)
    if found:
        return str(found[0].info.run_id), False
    tags = {**valid_names(start.get("tags") or {}, most=MAX_TAG), UID_TAG: uid}
    if parent_id is not None:
        tags[PARENT_TAG] = parent_id
    name = cut(str(start["run_name"]), most=MAX_NAME) if start.get("run_name") else None
    about: dict[str, Any] = {"start_time": start.get("start_ms"), "run_name": name}
    try:
        run, has_tags = client.create_run(experiment_id, tags=tags, **about), True
    except Exception as error:
        if not is_refusal(error):
            raise
        few = {key: value for key, value in tags.items() if key == UID_TAG or key.startswith("mlflow.source.")}
        run, has_tags = client.create_run(experiment_id, tags=few, **about), False
    return _with_id(str(run.info.run_id or ""), "the new run"), has_tags


def find_parent(client: MlflowClient, experiment: str, *, uid: str) -> str:
    """Return the id of the run with this uid, in the experiment or NAME-2, NAME-3, ...; one in the trash if there is no other.

    Raises:
        ParentMissingError: If there is no such run.
    """
    from mlflow.entities import ViewType

    candidates = itertools.islice(_candidates(client, experiment), MAX_NAMES)
    experiment_ids = [found.experiment_id for _, found in candidates if found is not None]
    for view in (ViewType.ACTIVE_ONLY, ViewType.ALL) if experiment_ids else ():
        found = client.search_runs(experiment_ids, f"tags.`{UID_TAG}` = '{uid}'", run_view_type=view, max_results=1)
        if found:
            return str(found[0].info.run_id)
    raise ParentMissingError(f"the parent run is not in {experiment} yet")


def check_run(client: MlflowClient, run_id: str) -> Run:
    """Return the run, in two requests. Raises: RunGoneError, RunDeletedError, or an error of the store."""
    from mlflow.exceptions import MlflowException, RestException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        from_store = isinstance(error, RestException) or not client.tracking_uri.startswith("http")
        if error.error_code == "RESOURCE_DOES_NOT_EXIST" and from_store:  # not the 404 of a proxy
            raise RunGoneError(f"the store no longer has the run {run_id}") from error
        raise
    number = run.info.experiment_id
    if (experiment := client.get_experiment(number)).lifecycle_stage != "active":
        fix = f"mlflow experiments restore --experiment-id {number}, then python -m runner sync"
        raise RunDeletedError(f"the experiment {experiment.name} was deleted in MLflow; to continue: {fix}")
    if run.info.lifecycle_stage != "active":
        fix = f"mlflow runs restore --run-id {run_id}, then python -m runner sync"
        raise RunDeletedError(f"run {run_id} was deleted in MLflow; to continue: {fix}")
    return run


def is_older(error: MlflowException) -> bool:
    """Return whether the server does not know the URL: MLflow 2 answers with HTML."""
    from mlflow.exceptions import RestException

    return error.error_code == "ENDPOINT_NOT_FOUND" and not isinstance(error, RestException)


def is_refusal(error: Exception) -> bool:
    """Return whether the store refuses a value. Other errors may pass: an outage, a full disk, a proxy."""
    from mlflow.exceptions import MlflowException, RestException

    if not isinstance(error, MlflowException):
        return False
    return error.error_code == "INVALID_PARAMETER_VALUE" or (
        isinstance(error, RestException) and error.error_code == "BAD_REQUEST"
    )


def explain(error: BaseException, *, uri: str, experiment: str | None = None) -> str:
    """Return in one line, without passwords, what is wrong with the store and, if known, what helps.

    experiment: Of the run that could not be sent.
    """
    where, text = store_uri.shown(uri), str(error)[:MAX_TEXT]
    if "out-of-date database schema" in text:
        return f"{where} is of an older MLflow; run `mlflow db upgrade {where}`, then `python -m runner sync`"
    if "Connection refused" in text or "Failed to resolve" in text or "NameResolutionError" in text:
        return f"{where} does not answer"
    if TOO_LONG in text:
        return f"{where} sent {TOO_LONG}: it is not an MLflow server"
    if "Connection aborted" in text or "Connection broken" in text or "IncompleteRead" in text:
        return f"{where} closed the connection"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return f"{where} does not answer in time"
    if getattr(error, "error_code", "") == "PERMISSION_DENIED":
        target = f"the experiment {experiment}" if experiment else "this experiment"
        return f"{where} does not let you write to {target}: ask its owner, or use tracking.experiment=OTHER"
    if isinstance(error, ModuleNotFoundError) and error.name == "boto3":
        return f"the files of {where} are in S3, and boto3 is missing: run `pip install boto3`, then `python -m runner sync`"
    if getattr(error, "error_code", "") in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"):
        return f"{where} refuses these credentials (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)"
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    named = (
        line
        if type(error).__name__ in ("MlflowException", "RestException", *_OURS)
        else f"{type(error).__name__}: {line}"
    )
    return cut(store_uri.masker(uri)(named), most=400)


_OURS = ("RunGoneError", "RunDeletedError", "ParentMissingError")
