"""Find the MLflow store of a command: from its arguments, the environment, or its runs. No store is opened."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from runner.config import origin, secrets
from runner.config.secrets import HIDDEN, uri_problems
from runner.errors import RunnerError, refuse, without_password
from runner.tracking import store_uri

VARIABLE = "MLFLOW_TRACKING_URI"
USUAL = "sqlite:///mlflow.db"


def named(words: Sequence[str]) -> str | None:
    """Return the store in the arguments, else in the environment, or None. Raises: RunnerError for an invalid one."""
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("tracking.uri=")]
    if not given:
        return os.environ.get(VARIABLE) or None
    uri = given[-1].strip("'\"")
    refuse(uri_problems(uri))
    return uri


def note_unused(words: Sequence[str]) -> None:
    """Print that a store among the arguments is not read."""
    for uri in [word for word in words if word.startswith("tracking.uri=")][-1:]:
        print(
            f"note: {without_password(uri)} has no effect: all runs have their directories here, with all points in them"
        )


def of_run(folder: Path, *, asked: str) -> str:
    """Return the store of a run that this user made. Raises: RunnerError if it is unknown."""
    store = origin.store_of(folder)
    path = store_uri.sqlite_path(store or "")
    if store is None:
        problem = f"`{folder}` was not made here by you, or was changed, so the store in it is not used"
        raise RunnerError.of(asked, problem, f"run `{asked} tracking.uri=URI`; the default store here is {USUAL}")
    if not store:
        problem = f"`{folder}` was run with `tracking.enabled=false`, so it has no store"
        raise RunnerError.of(asked, problem, f"run `{asked} tracking.uri=URI`")
    if HIDDEN.search(store):
        fix = f"run `{asked} tracking.uri={HIDDEN.sub('PASSWORD', store)}`, or set `{VARIABLE}`"
        raise RunnerError.of(
            asked, f"the run's store is {store}, and a run directory stores no credentials", fix, code="secret"
        )
    if path is not None and not path.parent.is_dir():
        problem = f"the run was tracked to {store}, and `{path.parent}` doesn't exist"
        raise RunnerError.of(asked, problem, f"run `{asked} tracking.uri=URI`")
    return _filled_in(store, asked=asked)


def of_last(folders: Iterable[Path], *, asked: str) -> str:
    """Return the store of the first tracked run, or the default store if it exists. Raises: RunnerError."""
    tracked = next((folder for folder in folders if origin.store_of(folder) != ""), None)
    if tracked is not None:
        return of_run(tracked, asked=asked)
    if (path := store_uri.sqlite_path(USUAL)) is not None and path.is_file():
        return USUAL
    problem = f"no run in outputs or multirun was tracked, and `{USUAL.rpartition('/')[2]}` is not here"
    raise RunnerError.of(asked, problem, f"run `{asked} tracking.uri=URI`")


def page_of(uri: str, folders: Iterable[Path]) -> str:
    """Return the path on the server of the first run's experiment that the store has, or an empty string.

    It includes `workflowType`, as MLflow 3.17 opens its page for language models otherwise.
    """
    from runner.tracking.ack import read_ack  # numpy

    of_store = (ack.experiment_id for ack in map(read_ack, folders) if ack.uri == store_uri.shown(uri))
    found = next(filter(None, of_store), None)
    return f"/#/experiments/{found}/runs?workflowType=machine_learning" if found else ""


def _filled_in(store: str, *, asked: str) -> str:
    try:
        uri = str(secrets.filled_in(store))
    except KeyError as error:
        problem = f"the run's store is {store}, and the environment variable {error.args[0]} is not set"
        raise RunnerError.of(asked, problem, f"set `{error.args[0]}`, or run `{asked} tracking.uri=URI`") from None
    secrets.note_secrets(store)
    return uri


def words_for(uri: str) -> str:
    """Return the argument with which a printed command finds this store; empty for the default one."""
    if store_uri.shown(uri) == store_uri.shown(USUAL):
        return ""
    shown = without_password(uri)
    if not HIDDEN.search(shown) and shown != uri:
        return ""  # from the environment: the run directory names the variable
    if shown == uri:
        return shlex.quote(f"tracking.uri={uri}")
    if os.environ.get(VARIABLE) == uri:
        return f"# {VARIABLE} names the store"
    return shlex.quote(f"tracking.uri={HIDDEN.sub('PASSWORD', shown)}")
