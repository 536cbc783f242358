"""An MLflow store, opened and asked: its experiments, and a run that is made once, however often one asks.

Used by the publishing process and by the commands that talk to a store; a training never opens one. It keeps no state.
"""

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
from runner.tracking.answer_limit import TOO_LONG
from runner.tracking.mlflow_names import MOST_NAME, MOST_TAG, cut, valid_names

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run
    from mlflow.exceptions import MlflowException

UID_TAG = "runner.uid"
PARENT_TAG = "mlflow.parentRunId"  # MLflow's page shows the run below this one
#: MLflow's page opens on training runs, not on traces of language models
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
#: retries are ours: MLflow's own block for four minutes (measured: 246.7 s), and a repeated creation makes a second run
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_UV_AUTO_DETECT": "false",  # else a model takes the current folder's pyproject.toml with it
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
TIMEOUT, TIMEOUT_SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT", "20"  # of a whole answer; the person's own wins


MOST_NAMES = 10  # NAME, NAME-2, ...: deleted experiments that are gone past
MOST_TEXT = 100_000  # of an error's words: MLflow puts the whole answer into them


class RunGoneError(Exception):
    """The store has lost the run: it was made anew, or the run was deleted for good. Its journal can be replayed."""


class RunDeletedError(Exception):
    """The run lies in MLflow's bin: it takes nothing until somebody restores it."""


class ParentMissingError(Exception):
    """The run that another one belongs to is not in the store, or not yet: its own journal brings it."""


@contextmanager
def settings() -> Iterator[None]:
    """MLflow with our patience instead of its own, and without its warnings; all is as before, afterwards.

    Imports MLflow (1 s).
    """
    ours = {TIMEOUT: os.environ.get(TIMEOUT, TIMEOUT_SECONDS), **SETTINGS}
    try:
        Path.home()
    except RuntimeError:  # no HOME and an unknown user: MLflow can't be imported
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
    """Imports what MLflow's stores in sqlite need (1.5 s), without what they never use: its pages of errors in colour, 0.3 s."""
    unused = "mako.ext.pygmentplugin"
    is_new = unused not in sys.modules
    if is_new:
        sys.modules[unused] = None  # type: ignore[assignment]  # Mako does without it
    try:
        with loading():
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    finally:
        if is_new:
            del sys.modules[unused]


def open_store(uri: str) -> MlflowClient:
    """Imports MLflow (about 1 s) and opens the store; a new sqlite store is created first (about 2 s).

    One process at a time creates it: MLflow's own migrations fail when several meet in an empty file.
    Raises: what MLflow raises; whatever it is, asking again is safe.
    """
    from mlflow import MlflowClient  # 1 s, and nothing that trains may pay for it

    path = store_uri.sqlite_path(uri)
    if path is None:
        return MlflowClient(uri)
    with FileLock(store_uri.creation_lock(path), timeout=120, thread_local=False):
        if not path.exists():
            _make_database(path)
        client = MlflowClient(store_uri.absolute(uri))
        client.search_experiments(max_results=1)  # one of the two opens the database, depending on the version
    return client


def _make_database(path: Path) -> None:
    """A new sqlite store, beside its place until it is whole: MLflow's migrations can't go on where a process that was
    killed has left them."""
    from mlflow import MlflowClient

    making = path.with_name(f".{path.name}.making")
    for left in (making, making.with_name(f"{making.name}-journal")):
        left.unlink(missing_ok=True)
    client = MlflowClient(f"sqlite:///{making}")
    client.search_experiments(max_results=1)
    store: Any = client._tracking_client.store
    store.engine.dispose()  # MLflow keeps it, and its connection to a file that is about to move
    making.replace(path)


def ask(uri: str) -> None:
    """One small question, 5 ms; raises what keeps the store from answering."""
    open_store(uri).search_experiments(max_results=1)


def experiment_of(client: MlflowClient, name: str, *, uri: str) -> tuple[str, str]:
    """The experiment's id and name; made if need be. One in MLflow's bin keeps its name: then NAME-2, NAME-3, ..."""
    from mlflow.exceptions import MlflowException

    for wanted, found in itertools.islice(_bearers(client, name), MOST_NAMES):
        if found is None:
            try:
                made = client.create_experiment(wanted, store_uri.artifact_root(uri), EXPERIMENT_TAGS)
                return _known(made, f"an experiment {wanted} that it has made"), wanted
            except MlflowException as error:  # another run was faster
                found = client.get_experiment_by_name(wanted)
                if found is None:
                    raise error from None
        if found.lifecycle_stage == "active":
            return found.experiment_id, wanted
    raise MlflowException(f"{MOST_NAMES} experiments named {name} were deleted; to go on: tracking.experiment=OTHER")


def _bearers(client: MlflowClient, name: str) -> Iterator[tuple[str, Experiment | None]]:
    """NAME, NAME-2, ... and their experiments, up to the first that is not there (None)."""
    for number in itertools.count(1):
        wanted = name if number == 1 else f"{name}-{number}"
        found = client.get_experiment_by_name(wanted)
        if found is not None:
            _known(found.experiment_id, f"the experiment {wanted}")
        yield wanted, found
        if found is None:
            return


def _known(name: str, of: str) -> str:
    from mlflow.exceptions import MlflowException

    if not name:
        raise MlflowException(f"the store answers, but names no id of {of}: is it an MLflow server?")
    return name


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
    tags = {**valid_names(start.get("tags") or {}, most=MOST_TAG), UID_TAG: uid}
    if parent_id is not None:
        tags[PARENT_TAG] = parent_id
    name = cut(str(start["run_name"]), most=MOST_NAME) if start.get("run_name") else None
    about: dict[str, Any] = {"start_time": start.get("start_ms"), "run_name": name}
    try:
        run, has_tags = client.create_run(experiment_id, tags=tags, **about), True
    except Exception as error:
        if not is_refusal(error):
            raise
        few = {key: value for key, value in tags.items() if key == UID_TAG or key.startswith("mlflow.source.")}
        run, has_tags = client.create_run(experiment_id, tags=few, **about), False
    return _known(str(run.info.run_id or ""), "a run that it has made"), has_tags


def find_parent(client: MlflowClient, experiment: str, *, uid: str) -> str:
    """The id of the run that bears this uid, in the experiment or in one that took its place, NAME-2, NAME-3, ...

    One that lies in the bin counts where there is no other. Raises: ParentMissingError.
    """
    from mlflow.entities import ViewType

    bearers = itertools.islice(_bearers(client, experiment), MOST_NAMES)
    experiment_ids = [found.experiment_id for _, found in bearers if found is not None]
    for view in (ViewType.ACTIVE_ONLY, ViewType.ALL) if experiment_ids else ():
        found = client.search_runs(experiment_ids, f"tags.`{UID_TAG}` = '{uid}'", run_view_type=view, max_results=1)
        if found:
            return str(found[0].info.run_id)
    raise ParentMissingError(f"the run that it belongs to has not arrived in {experiment}")


def check_run(client: MlflowClient, run_id: str) -> Run:
    """Return the run, in two requests. Raises: RunGoneError, RunDeletedError, or what keeps the store from answering."""
    from mlflow.exceptions import MlflowException, RestException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        from_store = isinstance(error, RestException) or not client.tracking_uri.startswith("http")
        if error.error_code == "RESOURCE_DOES_NOT_EXIST" and from_store:  # a proxy's 404 says nothing about the run
            raise RunGoneError(f"the store has no run {run_id} any more") from error
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
    """Whether the server does not know the address at all: one of MLflow 2 says so in HTML, not as MLflow does."""
    from mlflow.exceptions import RestException

    return error.error_code == "ENDPOINT_NOT_FOUND" and not isinstance(error, RestException)


def is_refusal(error: Exception) -> bool:
    """Whether the store has understood and will never take it. All else may pass: an outage, a full disk, a proxy."""
    from mlflow.exceptions import MlflowException, RestException

    if not isinstance(error, MlflowException):
        return False
    return error.error_code == "INVALID_PARAMETER_VALUE" or (
        isinstance(error, RestException) and error.error_code == "BAD_REQUEST"
    )


def explain(error: BaseException, *, uri: str, experiment: str | None = None) -> str:
    """Say in one line, without passwords, what is wrong with the store and, where known, what helps.

    experiment: of the run that could not be sent.
    """
    where, text = store_uri.shown(uri), str(error)[:MOST_TEXT]
    if "out-of-date database schema" in text:
        return f"{where} is of an older MLflow; to go on: mlflow db upgrade {where}, then python -m runner sync"
    if "Connection refused" in text or "Failed to resolve" in text or "NameResolutionError" in text:
        return f"{where} does not answer"
    if TOO_LONG in text:
        return f"{where} gave {TOO_LONG}: no MLflow server"
    if "Connection aborted" in text or "Connection broken" in text or "IncompleteRead" in text:
        return f"{where} broke off the connection"
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
