"""A tracking URI goes in; an open MLflow store and its experiment come out, made where they are not."""

from __future__ import annotations

import hashlib
import re
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock

SECONDS_FOR_A_NEW_STORE = 120


def connect(uri: str) -> Any:
    """A client whose store answers. A new sqlite store is made and migrated by one process while the others wait."""
    from mlflow import MlflowClient

    with _making(uri):
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)
    return client


def experiment(client: Any, uri: str, name: str) -> str:
    """The id of the experiment, made if need be; one that was deleted is brought back."""
    with _making(uri):
        known = client.get_experiment_by_name(name)
        if known is None:
            return str(client.create_experiment(name, artifact_location=_artifacts(uri)))
        if known.lifecycle_stage == "deleted":
            client.restore_experiment(known.experiment_id)
        return str(known.experiment_id)


def without_password(text: str) -> str:
    """Text with the passwords of its URIs hidden."""
    return re.sub(r"(://[^:/@\s]*):[^@/\s]*@", r"\1:***@", text)


def sqlite_file(uri: str) -> Path | None:
    """The database's file, for an sqlite URI; None for every other store."""
    match = re.match(r"sqlite(?:\+\w+)?:///(.+?)(?:\?.*)?$", uri)
    return Path(match[1]).absolute() if match else None


def _making(uri: str) -> AbstractContextManager[Any]:
    """Held while a store or an experiment may be made: eight processes that start at once must not make it eight times."""
    file = sqlite_file(uri)
    if file is None:
        return nullcontext()
    mark = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"runner-store-{mark}.lock", timeout=SECONDS_FOR_A_NEW_STORE)


def _artifacts(uri: str) -> str | None:
    """Beside the database, whatever folder the run was started from; a server decides for itself."""
    file = sqlite_file(uri)
    return None if file is None else (file.parent / "mlartifacts").as_uri()
