"""Find the MLflow store that has a run, and explain why a store does not answer. For commands after training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runner.config import origin
from runner.config.importing import restored
from runner.errors import RunnerError
from runner.tracking import mlflow_store, store_uri, stores
from runner.tracking.stores import VARIABLE


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
        problem, fix = (
            mlflow_store.explain(error, uri=uri),
            "try again when the store answers, or use `tracking.uri=URI`",
        )
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":  # it did answer
            fix = f"use `tracking.uri=URI` of the store that has it; this was {store_uri.shown(uri)}"
        raise RunnerError.of(asked, problem, fix) from error


@contextmanager
def as_default(uri: str) -> Iterator[None]:
    """Make a store MLflow's default, in which its registry resolves `models:/ID` (3.17)."""
    with restored(VARIABLE):
        os.environ[VARIABLE] = uri
        yield


def _whole(uri: str) -> str:
    return store_uri.shown(uri) if store_uri.sqlite_path(uri) else uri
