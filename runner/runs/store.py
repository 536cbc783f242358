"""Find the MLflow store that has a run, and explain why a store does not answer. For commands after training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config import origin
from runner.config.importing import restored
from runner.errors import RunnerError
from runner.tracking import mlflow_store, store_uri, stores
from runner.tracking.stores import VARIABLE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as StoredRun


def store_of(folder: Path, overrides: Sequence[str], *, asked: str) -> str:
    """Return the URI in the overrides, else the run's, with the password in the environment if it is for the same store.

    Raises:
        RunnerError: If neither names a store and another user made the run.
    """
    of_run = origin.store_of(folder)
    named = stores.named(overrides)
    is_by_word = any(word.lstrip("+").startswith("tracking.uri=") for word in overrides)
    if named is not None and (is_by_word or not of_run or store_uri.shown(named) == of_run):
        return _whole(named)
    return _whole(stores.USUAL) if of_run == "" else stores.of_run(folder, asked=asked)


@contextmanager
def answering(asked: str, uri: str) -> Iterator[None]:
    """Use MLflow with this project's time-outs. Raises: RunnerError for every error of the store or the connection."""
    try:
        with mlflow_store.settings():
            yield
    except RunnerError:
        raise
    except Exception as error:
        problem = mlflow_store.explain(error, uri=uri)
        fix = "try again when the store answers, or use `tracking.uri=URI`"
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":  # it did answer
            fix = f"name a run directory, or use `tracking.uri=URI` of the store that has it; this was {store_uri.shown(uri)}"
        raise RunnerError.of(asked, problem, fix) from error


@contextmanager
def open_stored(asked: str, run_id: str, uri: str) -> Iterator[tuple[MlflowClient, StoredRun]]:
    """Open a run that is in a store and in no directory here. Imports MLflow (1 s).

    Raises:
        RunnerError: If the store does not exist, does not answer, or does not have the run.
    """
    path = store_uri.sqlite_path(uri)
    if path is not None and not path.is_file():  # opening it would create it
        problem = f"no run in outputs or multirun has this id, and the store {store_uri.shown(uri)} does not exist"
        fix = f"name a run directory, or the store: `{asked} tracking.uri=URI`"
        raise RunnerError.of(asked, problem, fix)
    with answering(asked, uri):
        client = mlflow_store.open_store(
            _whole(uri)
        )  # MLflow caches stores by URI, independent of the current directory
        yield client, client.get_run(run_id)


@contextmanager
def as_default(uri: str) -> Iterator[None]:
    """Make a store MLflow's default, in which its registry resolves `models:/ID` (3.17)."""
    with restored(VARIABLE):
        os.environ[VARIABLE] = uri
        yield


def _whole(uri: str) -> str:
    return store_uri.shown(uri) if store_uri.sqlite_path(uri) else uri
